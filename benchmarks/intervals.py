"""How often the 90 % interval of a mean holds the true mean, for noise of several kinds.

    python -m benchmarks.intervals

Beside that of `overlapscope.account.means` it shows two bootstraps of circular blocks of steps: with blocks as long as
Politis and White (2004) choose them, and with blocks of the cube root of the number of steps. Both are widened by
Student's quantile for the number of blocks.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.noise import Floats, Noise, autoregressive, bimodal, heavy_tailed
from overlapscope.account.means import mean_of, student_95


def every_fourth(rng: np.random.Generator, steps: int, count: int) -> Floats:
    """Every fourth step is longer."""
    phase = rng.integers(0, 4, count)
    return ((np.arange(steps)[:, None] + phase) % 4 == 0) - 0.25 + 0.1 * rng.standard_normal((steps, count))


NOISE: dict[str, Noise] = {
    "normal": autoregressive(0.0),
    "AR 0.5": autoregressive(0.5),
    "AR 0.9": autoregressive(0.9),
    "heavy-tailed": heavy_tailed,
    "bimodal": bimodal,
    "every fourth": every_fourth,
}


def chosen_length(series: Floats) -> int:
    """The length of blocks after Politis and White (2004), "Automatic block-length selection"."""
    steps = len(series)
    deviation = series - series.mean()
    covariance = np.correlate(deviation, deviation, "full")[steps - 1 :] / steps
    if covariance[0] <= 0:
        return 1
    most, run = math.ceil(math.sqrt(steps)), max(5, math.ceil(math.sqrt(math.log10(steps))))
    is_small = np.abs(covariance / covariance[0]) < 2 * math.sqrt(math.log10(steps) / steps)
    last = next((lag - 1 for lag in range(1, most + run) if is_small[lag : lag + run].all()), most)
    lags = np.arange(1, min(2 * max(last, 1), most + run, steps - 1) + 1)
    weights = np.minimum(1.0, 2 * (1 - lags / lags[-1]))
    spectrum = covariance[0] + 2 * (weights * covariance[lags]).sum()
    slope = 2 * (weights * lags * covariance[lags]).sum()
    if spectrum <= 0:
        return 1
    return int(np.clip(round((1.5 * slope**2 / spectrum**2 * steps) ** (1 / 3)), 1, steps // 3))


def bootstrap_holds(rng: np.random.Generator, series: Floats, length: int, draws: int = 300) -> bool:
    """Whether the interval of a bootstrap of blocks holds 0."""
    steps = len(series)
    blocks = math.ceil(steps / length)
    sums = np.concatenate([[0.0], np.cumsum(np.tile(series, 2))])
    begins = rng.integers(0, steps, (draws, blocks))
    means = (sums[begins + length] - sums[begins]).sum(axis=1) / (blocks * length)
    free = np.array([max(2.0, steps / length - 1)])
    half = float(student_95(free)[0]) * means.std() * math.sqrt((free[0] + 1) / free[0])
    return bool(abs(series.mean()) <= half)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=2000, help="simulated for each line (default: 2000)")
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 30, 100, 300, 1000])
    args = parser.parse_args()
    rng = np.random.default_rng(15)
    print(f"{'steps':>6}  {'noise':<13}{'ours':>8}{'Politis-White':>15}{'cube root':>11}")
    for steps in args.steps:
        for name, noise in NOISE.items():
            series = noise(rng, steps, args.recordings)
            ours = np.mean([mean.low <= 0 <= mean.high for mean in mean_of(series)])
            some = series[:, : max(1, args.recordings // 5)].T
            chosen = np.mean([bootstrap_holds(rng, one, chosen_length(one)) for one in some])
            cube = np.mean([bootstrap_holds(rng, one, round(steps ** (1 / 3))) for one in some])
            print(f"{steps:>6}  {name:<13}{ours:>8.1%}{chosen:>15.1%}{cube:>11.1%}", flush=True)


if __name__ == "__main__":
    main()
