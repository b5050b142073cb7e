"""Bootstraps of circular blocks of steps, to hold the interval of ``overlapscope.breakdown.means`` against."""

from __future__ import annotations

import math

import numpy as np

from overlapscope.breakdown.means import student_quantile
from overlapscope.interval import SIGMAS_90
from tests.noise import Floats


def chosen_length(series: Floats) -> int:
    """Return the length of blocks after Politis and White (2004), "Automatic block-length selection"."""
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
    """Return whether the interval, widened by Student's quantile for the number of blocks, holds 0."""
    steps = len(series)
    blocks = math.ceil(steps / length)
    sums = np.concatenate([[0.0], np.cumsum(np.tile(series, 2))])
    begins = rng.integers(0, steps, (draws, blocks))
    means = (sums[begins + length] - sums[begins]).sum(axis=1) / (blocks * length)
    free = np.array([max(2.0, steps / length - 1)])
    half = float(student_quantile(free, SIGMAS_90)[0]) * means.std() * math.sqrt((free[0] + 1) / free[0])
    return bool(abs(series.mean()) <= half)
