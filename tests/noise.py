"""Noise of several kinds: (steps, count) series of mean 0 and standard deviation 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Floats]


def autoregressive(correlation: float) -> Noise:
    """Normal, and neighboring steps are alike."""

    def noise(rng: np.random.Generator, steps: int, count: int) -> Floats:
        shocks = rng.standard_normal((steps, count))
        series = shocks.copy()
        for step in range(1, steps):
            series[step] = correlation * series[step - 1] + math.sqrt(1 - correlation**2) * shocks[step]
        return series

    return noise


def heavy_tailed(rng: np.random.Generator, steps: int, count: int) -> Floats:
    """Log-normal with a sigma of 1."""
    usual, spread = math.exp(0.5), math.sqrt((math.e - 1) * math.e)
    return (np.exp(rng.standard_normal((steps, count))) - usual) / spread


def bimodal(rng: np.random.Generator, steps: int, count: int) -> Floats:
    """One step of five is longer."""
    return ((rng.random((steps, count)) < 0.2) - 0.2) / 0.4


def bursts(rng: np.random.Generator, steps: int, count: int) -> Floats:
    """Quiet, but for bursts of ten steps that are longer or shorter by eight times the noise, one of fifty steps."""
    begins = (rng.random((steps + 9, count)) < 0.02) * rng.standard_normal((steps + 9, count))
    sums = np.cumsum(np.concatenate([np.zeros((1, count)), begins]), axis=0)
    series = 8 * (sums[10:] - sums[:-10]) + rng.standard_normal((steps, count))
    return series / math.sqrt(1 + 64 * 10 * 0.02)
