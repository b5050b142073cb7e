"""Tests of whether a rank is later than the others all the time, for noise that lasts for several steps.

A series is how much longer a rank takes than the others, one value per cycle; noise makes it longer as often as
shorter. Two tests complement each other, and the better of the two counts, as one of two tries:

- The **sign test** counts how often the rank is later, among as many cycles as are independent. It assumes nothing
  about how large noise is, but throws sizes away, and of a few correlated cycles it can't say anything.
- The **mean test** compares the mean with the noise. A mean of independent values is known to 1 / sqrt(n) of their
  noise, one of values with a correlation of 0.99 hardly at all. Which of these it is can't be known from some dozen
  values, so it is averaged over: Student's t for each of several first-order autoregressive models of the noise,
  weighted by how well the model fits the series. ``benchmarks/false_alarms.py`` shows how often that is wrong.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc, ndtri, stdtr

from overlapscope.breakdown.means import effective_sample_size
from overlapscope.text import count_of

Floats = npt.NDArray[np.float64]

_CAUTION: Final = 0.0668
"""Probability that the correlation of neighbors is larger than it is taken for: one and a half standard errors."""
_TRIED: Final = 64
"""Number of series for which that is enough; without more, the sign test alone named somebody falsely in 0.3 % of
recordings of 1,024 ranks and 30 steps with AR 0.9."""
STEADY_SHARE: Final = 1 / 50
"""Maximum standard deviation, as a share of the mean, of a delay that can't be noise: of first-order autoregressive
series of 20 values with a correlation of 0.99, fewer than 1 in 100,000 are as steady and as far from 0."""

_CORRELATIONS: Final = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 0.99, 0.995)
"""Correlations of neighbors in the models of the noise."""
_PRIOR: Final = np.maximum((1 - np.array(_CORRELATIONS)) ** 2, 0.1)
"""Prior weights of these models. Noise that lasts long is rarer, but makes most false alarms: with weights of 1 there
is hardly any power in short series, and without the floor there are a hundred times as many false alarms in 30 values
with a correlation of 0.99."""
_MAX_VALUES: Final = 256
"""Number of values of the mean test; longer series are averaged in blocks of neighbors, which keeps their mean."""
_MIN_VALUES: Final = 5


@dataclass(frozen=True, kw_only=True)
class LocationTest:
    """How clearly a series is above 0."""

    late: int
    """Number of values above 0."""
    values: int
    """Number of values."""
    mean_ns: float
    """Mean."""
    p_value: float
    """Probability that noise alone would show as much."""
    independent: int | None
    """Number of independent values that the sign test counts; None if the mean test is the better one."""

    def describe(self, others: str) -> str:
        """Describe the evidence, such as ``longer than the others in 37 of 37 steps (sign test, p = 0.0001)``."""
        often = f"longer than {others} in {self.late} of {count_of(self.values, 'step')}"
        p_value = format_p_value(self.p_value)
        if self.independent is None:
            return f"{often}, by {self.mean_ns / 1e6:.2f} ms on average (t-test for noise that may last, {p_value})"
        few = f" of {self.independent} independent ones" if self.independent < self.values else ""
        return f"{often} (sign test{few}, {p_value})"


def run_location_test(series: Floats, independent_share: float) -> LocationTest:
    """Test whether a series is above 0, by the better one of two tests.

    Args:
        series: (S,) One value per cycle.
        independent_share: Share of its values that are independent, for the sign test.
    """
    late, early = int((series > 0).sum()), int((series < 0).sum())
    if series.std() <= STEADY_SHARE * abs(series.mean()):
        independent_share = 1.0
    tries = math.floor((late + early) * independent_share)
    by_signs = _sign_test(math.floor(late * independent_share), tries)
    by_mean = _mean_test(series)
    return LocationTest(
        late=late,
        values=len(series),
        mean_ns=float(series.mean()),
        p_value=min(1.0, 2 * min(by_signs, by_mean)),
        independent=tries if by_signs <= by_mean else None,
    )


def independent_share(series: Floats, levels: int = 1, tried: int = 1) -> float:
    """Return the share of values that are independent of each other, estimated with caution.

    Args:
        levels: Number of means that have been subtracted from the series before.
        tried: Number of series of which any may be found late. Of very many there is one that is late by chance and
            looks independent by chance.
    """
    sigmas = -float(ndtri(_CAUTION / max(1.0, tried / _TRIED)))
    found = effective_sample_size(series[:, None], levels=levels, sigmas=sigmas)
    return float(found[0]) / len(series)


def _sign_test(hits: int, tries: int) -> float:
    return float(bdtrc(hits - 1, tries, 0.5)) if hits > 0 else 1.0


def _mean_test(series: Floats) -> float:
    """Return the posterior probability of a mean below 0, averaged over models of the noise.

    The cosine transform of a stationary series has nearly uncorrelated coefficients, the first of which is its mean.
    For each model the others give the size of the noise (a chi-square), and so Student's t for the first.
    """
    values = _average_blocks(series, -(-len(series) // _MAX_VALUES))
    count = len(values)
    scale = values.std() if count else 0.0
    if count < _MIN_VALUES or scale <= np.finfo(float).tiny:
        return 1.0
    transform, variances = _noise_models(count)
    coefficients = transform @ (values / scale)
    power = (coefficients[1:] ** 2 / variances[:, 1:]).sum(axis=1)
    log_weights = np.log(_PRIOR) - np.log(variances[:, 1:]).sum(axis=1) / 2 - (count - 1) / 2 * np.log(power)
    weights = np.exp(log_weights - log_weights.max())
    below_zero = stdtr(count - 1, -coefficients[0] / np.sqrt(variances[:, 0] * power / (count - 1)))
    return float(weights @ below_zero / weights.sum())


def _average_blocks(series: Floats, width: int) -> Floats:
    """Average blocks of neighbors; a rest that is shorter than a block is left out."""
    averages: Floats = series[: len(series) // width * width].reshape(-1, width).mean(axis=1)
    return averages


@functools.lru_cache(maxsize=4)
def _noise_models(count: int) -> tuple[Floats, Floats]:
    """Return the orthonormal cosine transform (N, N), and the variances of its coefficients by model (M, N)."""
    index = np.arange(count)
    transform = np.sqrt(2 / count) * np.cos(np.pi * index[:, None] * (index + 0.5) / count)
    transform[0] = 1 / np.sqrt(count)
    distance = np.abs(index[:, None] - index)
    return transform, np.array([((transform @ (one**distance)) * transform).sum(axis=1) for one in _CORRELATIONS])


def format_p_value(p_value: float) -> str:
    """Format a probability, such as ``p = 0.004``."""
    return "p < 1e-12" if p_value < 1e-12 else f"p = {p_value:.1g}"
