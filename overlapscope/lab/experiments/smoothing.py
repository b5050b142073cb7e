"""The paper's smoothing of loss curves: a third-order low-pass filter run forward and backward, like filtfilt.

It is SciPy's ``butter(3, cutoff)`` and ``filtfilt`` (tests compare it with these), in a few lines, because nothing else
here needs SciPy.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from overlapscope.account.intervals import Float64Array

ORDER: Final = 3
_PADDING: Final = 3 * (ORDER + 1)


def smooth(series: Float64Array, cutoff: float) -> Float64Array:
    """Remove everything that changes faster than the cutoff, without a phase shift.

    Args:
        series: (S,) more than 12 values.
        cutoff: Cutoff as a share of the Nyquist frequency, between 0 and 1.
    """
    numerator, denominator = _butterworth(cutoff)
    # Both ends are extended point-symmetrically, so that the filter has settled where the series begins.
    before = 2 * series[0] - series[_PADDING:0:-1]
    after = 2 * series[-1] - series[-2 : -_PADDING - 2 : -1]
    forward = _apply_filter(np.concatenate([before, series, after]), numerator, denominator)
    backward = _apply_filter(forward[::-1], numerator, denominator)[::-1]
    return backward[_PADDING:-_PADDING]


def _butterworth(cutoff: float) -> tuple[Float64Array, Float64Array]:
    """Compute the coefficients of 1 / ((s + 1)(s² + s + 1)) by the bilinear transform; the denominator's first is 1."""
    warp = math.tan(math.pi * cutoff / 2)
    denominator = np.convolve([warp + 1, warp - 1], [warp**2 + warp + 1, 2 * warp**2 - 2, warp**2 - warp + 1])
    numerator = warp**3 * np.array([1.0, 3.0, 3.0, 1.0])
    return numerator / denominator[0], denominator / denominator[0]


def _apply_filter(series: Float64Array, numerator: Float64Array, denominator: Float64Array) -> Float64Array:
    """Apply the filter in transposed direct form, as if the first value had been constant before."""
    state = [float(series[0] * (numerator[index:] - denominator[index:]).sum()) for index in range(1, ORDER + 1)]
    result = np.empty_like(series, dtype=np.float64)
    for index, value in enumerate(series.tolist()):
        out = numerator[0] * value + state[0]
        state = [
            numerator[n] * value - denominator[n] * out + (state[n] if n < ORDER else 0.0) for n in range(1, ORDER + 1)
        ]
        result[index] = out
    return result
