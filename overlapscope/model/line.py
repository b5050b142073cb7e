"""A line of latency and time per byte, fitted robustly against outliers. Neither coefficient is ever negative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.model.partition import Float64Array

_ROUNDS: Final = 30
_SMALLEST_RESIDUAL: Final = 1e-4
"""Share of the time below which residuals count alike; otherwise a single point would determine the fit."""


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """Time as a line in bytes: ``alpha + beta x bytes``."""

    alpha_ns: float
    beta_ns: float
    """Nanoseconds per byte."""

    def time_ns(self, bytes_: npt.ArrayLike) -> Float64Array:
        """Return the times of sizes, an array of any shape."""
        return self.alpha_ns + self.beta_ns * np.asarray(bytes_, dtype=np.float64)


ZERO_COST: Final = CostLine(alpha_ns=0.0, beta_ns=0.0)
"""Cost of an operation that takes no time."""


def fit_line(bytes_: Float64Array, times_ns: Float64Array, weights: Float64Array | None = None) -> CostLine:
    """Fit the line with the smallest sum of absolute relative errors.

    Args:
        bytes_: (N,)
        times_ns: (N,) times; those that are not positive are ignored, and without any other the line is 0.
        weights: (N,) weight of each; equal if not given.
    """
    usable = (times_ns > 0) & np.isfinite(times_ns)
    if not usable.any():
        return ZERO_COST
    x, y = bytes_[usable], times_ns[usable]
    counts = np.ones(len(x)) if weights is None else weights[usable]
    if np.ptp(x) == 0:
        time_ns = float(np.median(y))
        return (
            CostLine(alpha_ns=0.0, beta_ns=time_ns / float(x[0]))
            if x[0] > 0
            else CostLine(alpha_ns=time_ns, beta_ns=0.0)
        )
    weight = counts / y**2
    alpha = beta = 0.0
    for _ in range(_ROUNDS):  # iteratively reweighted least squares approximates least absolute errors
        alpha, beta = _least_squares(x, y, weight)
        residuals = np.abs(alpha + beta * x - y) / y
        weight = counts / y**2 / np.maximum(residuals, _SMALLEST_RESIDUAL)
    return CostLine(alpha_ns=alpha, beta_ns=beta)


def _least_squares(x: Float64Array, y: Float64Array, weight: Float64Array) -> tuple[float, float]:
    total = weight.sum()
    mean_x, mean_y = (weight * x).sum() / total, (weight * y).sum() / total
    beta = float((weight * (x - mean_x) * (y - mean_y)).sum() / (weight * (x - mean_x) ** 2).sum())
    alpha = float(mean_y - beta * mean_x)
    if beta < 0:
        return float(mean_y), 0.0
    if alpha < 0:
        return 0.0, float((weight * x * y).sum() / (weight * x * x).sum())
    return alpha, beta
