"""Predicted gains of other settings of ``fully_shard`` against measured ones, over gloo and a link with a rate.

    python -m benchmarks.sharded_advice [--models mlp transformer] [--ranks 2 4] [--link 1gbit]

For each model and number of ranks the default setting is recorded, and the gain of each other setting predicted from
that recording as ``overlapscope recommend`` does. Then all settings are timed, in turns. Gains are shares of the step
with the default setting; noise is the difference between those of the odd and the even rounds. *prefetch N* alone
should gain nothing, as torch waits for each all-gather where it launches it. The last line says how many predicted
gains are within 3 points of the measured ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.quiet_machine import wait_until_quiet
from benchmarks.sharded_training import Setting, Task
from overlapscope.advice.sharded import describe_model
from overlapscope.advice.sharded_times import extract_step_times
from overlapscope.analysis import Analysis
from overlapscope.sharded_model.changes import predict_gain
from overlapscope.sharded_model.model import Settings, merge_all, merge_units, with_prefetch
from overlapscope.sharded_model.program import build_program
from overlapscope.sharded_model.schedule import simulate
from overlapscope.trace.recording import read_trace
from tests.cluster.shaped_link import LINKS, Ranks, ranks_over

SETTINGS: Final = (
    Setting(),
    Setting(depth=1),
    Setting(depth=2),
    Setting(is_async=True, depth=1),
    Setting(is_async=True, depth=2),
    Setting(reshards=False),
    Setting(reshards=False, is_async=True, depth=1),
    Setting(merged=2),
    Setting(merged=4),
    Setting(merged=0),
)
CLOSE: Final = 0.03
"""Difference of a predicted gain from the measured one that counts as close."""
TIME_LIMIT_S: Final = 400
LONGEST_WAIT_S: Final = 8


def predict_gains(trace: Path) -> list[float]:
    """Return the predicted gain of each setting over the recorded one, as a share."""
    analysis = Analysis(read_trace(trace))
    model, recorded, buckets = describe_model(analysis.trace)
    times, _ = extract_step_times(analysis, model, recorded, buckets)
    now_ns = simulate(times, build_program(model, recorded), recorded)
    print(
        f"recorded {analysis.summary.mean.step.value / 1e6:.1f} ms a step, replayed {now_ns.mean() / 1e6:.1f} ms",
        file=sys.stderr,
    )
    return [
        predict_gain(now_ns, times, build_program(model, other), other, hides_more=other.is_async).value
        for other in (translate(recorded, setting) for setting in SETTINGS)
    ]


def translate(recorded: Settings, setting: Setting) -> Settings:
    """Return what the model of the schedule calls a setting."""
    settings = recorded
    if setting.merged != 1:
        settings = merge_units(recorded, setting.merged) if setting.merged else merge_all(recorded)
    if setting.depth is not None:
        settings = with_prefetch(settings, setting.depth)
    return replace(settings, is_async=setting.is_async, reshards=(setting.reshards,) * len(settings.units))


def measure(ranks: Ranks, task: Task, folder: Path) -> None:
    """Run all ranks."""
    task.write(folder / "task.json")
    wait_until_quiet(LONGEST_WAIT_S)
    ranks.run(["-m", "benchmarks.sharded_training", str(folder)], {**os.environ, "OMP_NUM_THREADS": "1"}, TIME_LIMIT_S)


def run_case(console: Console, name: str, count: int, link: str, rounds: int, steps: int) -> tuple[int, int]:
    """Print a table; return the number of close predictions, and of all."""
    with ranks_over(LINKS[link], count) as ranks, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trace = folder / "trace"
        measure(ranks, Task(model=name, settings=SETTINGS[:1], rounds=1, steps=3 * steps * 2, trace=str(trace)), folder)
        predicted = predict_gains(trace)
        measure(ranks, Task(model=name, settings=SETTINGS, rounds=rounds, steps=steps), folder)
        times = json.loads((folder / "times.json").read_text())
    taken_s = [np.array(each).reshape(rounds, steps) for each in times["wall_s"]]
    table = Table(title=f"{name}, {count} ranks, {link}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("setting")
    for heading in ("step, ms", "predicted", "measured", "noise"):
        table.add_column(heading, justify="right")
    base_s = np.median(taken_s[0])
    close = 0
    for setting, step_s, gain in zip(SETTINGS, taken_s, predicted, strict=True):
        measured = 1 - np.median(step_s) / base_s
        halves = [np.median(step_s[part::2]) / np.median(taken_s[0][part::2]) for part in (0, 1)] if rounds > 1 else []
        is_close = abs(gain - measured) <= CLOSE
        close += is_close and setting != SETTINGS[0]
        noise = f"{abs(halves[0] - halves[1]):.1%}" if halves else "-"
        row = (f"{1e3 * np.median(step_s):.1f}", f"{gain:+.1%}", f"{measured:+.1%}{'' if is_close else ' !'}", noise)
        table.add_row(setting.label, *row)
    console.print(table)
    return close, len(SETTINGS) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_advice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=("tiny", "mlp", "transformer"), default=["mlp", "transformer"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--link", choices=LINKS, default="1gbit", metavar="LINK", help=", ".join(LINKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each setting in a round (default: 4)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    console = Console(highlight=False, soft_wrap=True)
    cases = [(name, count) for name in args.models for count in args.ranks]
    found = [run_case(console, name, count, args.link, args.rounds, args.steps) for name, count in cases]
    console.print(
        f"{sum(close for close, _ in found)} of {sum(number for _, number in found)} predicted gains are within "
        f"{100 * CLOSE:.0f} points of the measured ones"
    )


if __name__ == "__main__":
    main()
