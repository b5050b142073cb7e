"""How often ``overlapscope tune`` finds a gain, and sets what gains nothing, in simulated runs.

    python -m benchmarks.tuning_power [--tunings 200] [--steps 100]

Three settings have these true gains over the script's own. Steps vary by a white noise, and the mean of each run by
what runs of the same program differ by. What is run again and what is said are decided as ``tune`` does. For each case
are counted how often something is set, how often what is then had is 1 % slower than the fastest setting or more, how
often it is slower than the script's own, and runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.interval import Interval
from overlapscope.trace.ddp_trial import DDPSetting
from overlapscope.tuning.verdict import Run, Trained, decide, find_favorite, needs_another_pair

NOISES: Final = ((0.01, 0.003), (0.02, 0.003), (0.02, 0.006))
"""Of a step, and of a run."""
GAINS: Final = ((0.0, 0.0, 0.0), (-0.01, -0.02, 0.005), (0.013, 0.0, 0.003), (0.02, 0.005, 0.0), (0.03, 0.01, 0.02))
STEP_NS: Final = 1e8
PREDICTED: Final = Interval(value=0.02, low=-0.02, high=0.06)


class SimulatedTuning:
    """One tuning of a training whose true gains are known."""

    def __init__(self, gains: Sequence[float], steps: int, noise: tuple[float, float], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._steps, self._noise, self.runs = steps, noise, 0
        base = Trained(setting=DDPSetting(), predicted=None, runs=(self._run(0.0),))
        settings = [DDPSetting(caps_mb=(number + 1.0,)) for number in range(len(gains))]
        tried = [
            Trained(setting=setting, predicted=PREDICTED, runs=(self._run(gain),))
            for setting, gain in zip(settings, gains, strict=True)
        ]
        while (favorite := find_favorite(base, tried)) is not None and needs_another_pair(base, favorite):
            place = tried.index(favorite)
            tried[place] = favorite.with_run(self._run(gains[place]))
            base = base.with_run(self._run(0.0))
        outcome = decide(base, tried)
        self.is_set = outcome.verdict == "set"
        self.gain = gains[tried.index(outcome.best)] if self.is_set and outcome.best is not None else 0.0

    def _run(self, gain: float) -> Run:
        self.runs += 1
        of_step, of_run = self._noise
        mean_ns = STEP_NS * (1 - gain) * np.exp(of_run * self._random.standard_normal())
        return Run(number=self.runs, steps_ns=mean_ns * (1 + of_step * self._random.standard_normal(self._steps)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning_power",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tunings", type=int, default=200, help="of each case (default: 200)")
    parser.add_argument("--steps", type=int, default=100, help="of each run (default: 100)")
    args = parser.parse_args()
    table = Table(box=SIMPLE_HEAD)
    for heading in ("steps, runs vary by", "gains", "set", "1 % over the fastest", "slower than before", "runs"):
        table.add_column(heading, no_wrap=True)
    for noise in NOISES:
        for gains in GAINS:
            tunings = [SimulatedTuning(gains, args.steps, noise, seed) for seed in range(args.tunings)]
            best = max(0.0, *gains)
            table.add_row(
                f"{noise[0]:.1%}, {noise[1]:.1%}",
                ", ".join(f"{gain:.1%}" for gain in gains),
                f"{np.mean([each.is_set for each in tunings]):.0%}",
                f"{np.mean([best - each.gain > 0.01 for each in tunings]):.0%}",
                f"{np.mean([each.gain < 0 for each in tunings]):.0%}",
                f"{np.mean([each.runs for each in tunings]):.1f}",
            )
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    console.print(table)


if __name__ == "__main__":
    main()
