"""Temporal patterns of a delay: in all steps, every k-th, from one step on, in episodes, or now and then.

A series is how much longer a rank takes than the others, one value per cycle; noise makes it longer as often as
shorter. The usual value is estimated from the lower half, which is valid as long as fewer than half of the values are
delayed. Every pattern comes with the statistic that shows it, and with the probability that noise alone would show as
much. Noise that lasts for several consecutive steps shows more, so correlated neighbors count for as many steps as are
independent; but noise that is far from 0 throughout, and hardly varies, would have to last many times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

from overlapscope.stragglers.location_test import Floats, format_p_value, independent_share, run_location_test
from overlapscope.text import count_of


def runs_test_p_value(runs: int, hits: int, tries: int) -> float:
    """Return the probability that hits in random order among tries form at most that many runs.

    Wald and Wolfowitz, "On a test whether two samples are from the same population", 1940.

    Example: 2 hits in 4 tries form one run in 3 of the 6 orders, so the probability of at most 1 run is 0.5.
    """
    from scipy.stats import hypergeom  # takes longer to import than all the rest, and few series have episodes

    # A run begins at as many of the hits - 1 gaps between hits as are no neighbors, and at the first hit.
    return float(hypergeom.cdf(runs, tries, max(0, tries - hits + 1), hits)) if hits > 0 else 1.0


Mask = npt.NDArray[np.bool_]

PatternKind = Literal["persistent", "shift", "episode", "periodic", "transient"]

SIGNIFICANCE: Final = 1e-4
"""Significance level of a pattern of a single series, counting all tries of a search. Callers that test many series
have to use a lower one."""

DELAY_SIGMAS: Final = 6.0
"""A value this many standard deviations above normal is delayed."""

_MIN_VALUES: Final = 5
"""Minimum number of cycles on either side of a change."""
_MIN_PERIODIC: Final = 4
"""Minimum number of delays of a period."""
_LOW_QUANTILE, _MIDDLE_QUANTILE = 0.10, 0.40
"""Quantiles of a series that mean and standard deviation are estimated from."""
_SIGMAS_BETWEEN: Final = 1.0282
"""Distance between these quantiles in a normal distribution, in standard deviations."""
_SIGMAS_TO_MEAN: Final = 0.2533
"""Distance from the second one to the mean."""
_FEW_VALUES: Final = 15
"""Number of values at which the standard deviation may well be twice its estimate."""
_MAD_TO_SIGMA: Final = 1.4826
_MIN_SEPARATION: Final = 6.0
"""Minimum ratio of the delay in episodes to the noise that remains without it. In normal noise that is cut in two at
its mean the halves are 2.3 times as far apart, and in a series that only rises 2.7 times."""
_FIRST_CUT_SIGMAS: Final = 3.0
"""Standard deviations above normal of the first threshold in the search for episodes."""
_MAX_MISSED_SHARE: Final = 0.25
"""Maximum share of the delays predicted by a period that may be missing."""
_SMALLEST_TO_LARGEST: Final = 0.1
"""Minimum ratio of a transient delay to the largest one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DelayPattern:
    """The delayed values of a series and the pattern that they form."""

    kind: PatternKind
    where: Mask
    """(S,) True for delayed values."""
    usual_ns: float
    """Usual value of the series without the delay: 0 if it is delayed all the time."""
    statistic: str
    """The evidence in words."""
    p_value: float
    """Probability that noise alone would show as much; 0 if too small for a float. NaN for transient delays: these are
    a fact about some steps that has no implication for others."""
    period: int | None = None
    """Steps from one delay to the next, if periodic."""


def find_patterns(
    series_ns: npt.ArrayLike,
    steps: npt.NDArray[np.int64],
    least_ns: float,
    *,
    significance: float = SIGNIFICANCE,
    persistent_significance: float | None = None,
    others: str = "the others",
) -> list[DelayPattern]:
    """Find the patterns of a series: at most one lasting delay, and periodic or transient delays on top of it.

    Args:
        series_ns: (S,) One value per cycle.
        steps: (S,) Numbers of the steps, ascending.
        least_ns: Minimum delay of interest.
        significance: Maximum probability that noise would show as much.
        persistent_significance: The same for a delay all the time, where more is known of the rank than this series.
        others: What the series is compared with, in words.
    """
    series = np.asarray(series_ns, dtype=np.float64)
    found: list[DelayPattern] = []
    rest = series
    of_persistent = persistent_significance or significance
    change = _find_level_change(series, max(significance, of_persistent))
    shift = None if change is None else _find_shift(series, change, steps, least_ns, significance)
    baseline = estimate_baseline(series)
    episodes = _find_episodes(series, baseline, least_ns, significance)
    if (lasting := _choose_lasting(shift, episodes)) is not None:
        found.append(lasting)
        rest = np.where(lasting.where, series - np.median(series[lasting.where]) + lasting.usual_ns, series)
    elif (persistent := _find_persistent(series, change, least_ns, of_persistent, others)) is not None:
        found.append(persistent)
    usual_ns, sigma_ns = baseline if rest is series else estimate_baseline(rest)
    delayed = rest > usual_ns + max(DELAY_SIGMAS * sigma_ns, least_ns)
    periodic = _find_periodic(delayed, steps, usual_ns, significance)
    if periodic is not None:
        found.append(periodic)
        delayed &= ~periodic.where
    if delayed.any():
        # Hiccups of milliseconds are a different, and minor, problem than a pause of seconds.
        delayed &= rest - usual_ns >= _SMALLEST_TO_LARGEST * (rest[delayed].max() - usual_ns)
        found.append(_transient(rest, delayed, usual_ns, sigma_ns))
    return found


def estimate_baseline(series_ns: Floats) -> tuple[float, float]:
    """Return the mean of the values that are not delayed, assuming normality, and a cautious standard deviation."""
    low, middle = np.quantile(series_ns, [_LOW_QUANTILE, _MIDDLE_QUANTILE])
    sigma = (middle - low) / _SIGMAS_BETWEEN
    return float(middle + _SIGMAS_TO_MEAN * sigma), float(sigma) * (1 + _FEW_VALUES / len(series_ns))


def _find_persistent(
    series: Floats, change: _LevelChange | None, least_ns: float, significance: float, others: str
) -> DelayPattern | None:
    """Return the pattern of a delay in most cycles, if significant by ``run_location_test``."""
    # Not the median: if every other step is delayed, the median may be a delayed one.
    if float(np.quantile(series, _MIDDLE_QUANTILE)) < least_ns:
        return None
    # A change of level makes neighbors correlated, but is not noise.
    has_levels = change is not None and change.p_value <= significance
    share = change.independent_share if change is not None and has_levels else independent_share(series)
    found = run_location_test(series, share)
    if found.p_value > significance:
        return None
    return DelayPattern(
        kind="persistent",
        where=np.ones(len(series), dtype=bool),
        usual_ns=0.0,
        statistic=found.describe(others),
        p_value=found.p_value,
    )


@dataclass(frozen=True, kw_only=True)
class _LevelChange:
    """The cycle that best divides a series into two levels."""

    at: int
    """Index of the first cycle of the second level."""
    distance: float
    """Statistic of the Mann-Whitney test in standard deviations, if all cycles were independent."""
    tries: int
    """Number of cycles that were tried."""
    independent_share: float
    """Share of cycles that are independent of each other within the levels."""

    @property
    def p_value(self) -> float:
        """Return the probability that noise would divide the series as clearly."""
        return _level_change_p_value(self.distance * math.sqrt(self.independent_share), self.tries)


def _level_change_p_value(distance: float, tries: int) -> float:
    return min(1.0, math.erfc(distance / math.sqrt(2)) * tries)


def _find_level_change(series: Floats, significance: float) -> _LevelChange | None:
    """Return the best change of level of a series; None if it is too short, or without any that is significant."""
    count = len(series)
    if count < 2 * _MIN_VALUES:
        return None
    before_count = np.arange(1, count + 1)
    rank_sum = np.cumsum(_mean_ranks(series)) - before_count * (count + 1) / 2
    deviation = np.sqrt(before_count * (count - before_count) * (count + 1) / 12)
    tried = slice(_MIN_VALUES - 1, count - _MIN_VALUES)
    distances = np.abs(rank_sum[tried]) / deviation[tried]
    if _level_change_p_value(float(distances.max()), len(distances)) > significance:  # though all were independent
        return None
    at = _refine_change(series, int(distances.argmax()) + _MIN_VALUES)
    levels = np.concatenate([part - part.mean() for part in (series[:at], series[at:])])
    return _LevelChange(
        at=at,
        distance=float(distances.max()),
        tries=len(distances),
        independent_share=independent_share(levels, 2),
    )


def _find_shift(
    series: Floats, change: _LevelChange, steps: npt.NDArray[np.int64], least_ns: float, significance: float
) -> DelayPattern | None:
    """Return the pattern of a delay from one step on, or until one step, by a Mann-Whitney test at each step.

    Correlated neighbors within the two levels reduce the statistic to that of as many independent steps.
    """
    count = len(series)
    before, after = series[: change.at], series[change.at :]
    if change.p_value > significance:
        return None
    is_late_after = np.median(after) > np.median(before)
    usual, late = (before, after) if is_late_after else (after, before)
    usual_ns, rise_ns = float(np.median(usual)), float(np.median(late) - np.median(usual))
    deviations = np.concatenate([np.abs(part - np.median(part)) for part in (before, after)])
    noise_ns = _MAD_TO_SIGMA * float(np.median(deviations))
    # A rank that is always late by varying amounts is persistently late; drifting noise is no change of level.
    if rise_ns < max(least_ns, 2 * noise_ns) or usual_ns > rise_ns / 2:
        return None
    where = np.zeros(count, dtype=bool)
    where[change.at :] = is_late_after
    where[: change.at] = not is_late_after
    since = f"from step {steps[change.at]} on" if is_late_after else f"until step {steps[change.at - 1]}"
    independent = math.floor(count * change.independent_share)
    return DelayPattern(
        kind="shift",
        where=where,
        usual_ns=usual_ns,
        statistic=f"{since} {rise_ns / 1e6:.2f} ms longer "
        f"(Mann-Whitney test{_format_sample_size(independent, count)}, {format_p_value(change.p_value)})",
        p_value=change.p_value,
    )


def _refine_change(series: Floats, change: int) -> int:
    """Return the step that separates the two levels best.

    Ranks of values alone are off by some steps, as the order within a level affects them.
    """
    nearer_after = np.abs(series - np.median(series[:change])) - np.abs(series - np.median(series[change:]))
    tried = np.cumsum(nearer_after)[_MIN_VALUES - 1 : len(series) - _MIN_VALUES]
    return int(tried.argmin()) + _MIN_VALUES


def _find_episodes(
    series: Floats, baseline: tuple[float, float], least_ns: float, significance: float
) -> DelayPattern | None:
    """Return the pattern of a delay in one or more episodes of consecutive steps.

    Such a series has two levels that are far apart, changes from one to the other within one step, and its delayed
    values are in fewer runs than chance would form of as many values as are independent within the levels.

    Args:
        baseline: From ``estimate_baseline``.
    """
    usual_ns, sigma_ns = baseline
    cut_ns = usual_ns + max(_FIRST_CUT_SIGMAS * sigma_ns, least_ns)
    for _ in range(2):  # the first threshold selects the delayed values roughly, and these define the levels
        delayed = series > cut_ns
        if not _MIN_VALUES <= delayed.sum() <= len(series) - _MIN_VALUES:
            return None
        usual_ns, late_ns = float(np.median(series[~delayed])), float(np.median(series[delayed]))
        cut_ns = (usual_ns + late_ns) / 2
    rise_ns = late_ns - usual_ns
    levels = series - np.where(delayed, late_ns, usual_ns)
    if (
        rise_ns < max(least_ns, _MIN_SEPARATION * _MAD_TO_SIGMA * float(np.median(np.abs(levels))))
        or usual_ns > rise_ns / 2
    ):
        return None
    into_or_out = np.flatnonzero(delayed[1:] != delayed[:-1])
    if float(np.median(np.abs(np.diff(series)[into_or_out]))) < rise_ns / 2:  # lasting noise comes and goes slowly
        return None
    runs = count_runs(delayed)
    share = independent_share(levels, 2)
    p_value = runs_test_p_value(runs, math.floor(delayed.sum() * share), math.floor(len(series) * share))
    if p_value > significance:
        return None
    return DelayPattern(
        kind="episode",
        where=delayed,
        usual_ns=usual_ns,
        statistic=f"{delayed.sum()} steps are {rise_ns / 1e6:.2f} ms longer, in "
        f"{count_of(runs, 'episode')} (runs test, {format_p_value(p_value)})",
        p_value=p_value,
    )


def _choose_lasting(shift: DelayPattern | None, episodes: DelayPattern | None) -> DelayPattern | None:
    """Return the better of two lasting patterns: episodes if a single change misclassifies too many values."""
    if shift is None or episodes is None:
        return shift or episodes
    return episodes if (shift.where != episodes.where).sum() >= _MIN_VALUES else shift


def _find_periodic(
    delayed: Mask, steps: npt.NDArray[np.int64], usual_ns: float, significance: float
) -> DelayPattern | None:
    """Return the pattern of delays at equal distances, if more of the predicted steps are delayed than by chance."""
    late_steps = steps[delayed]
    periods = np.unique(np.diff(late_steps))
    periods = periods[periods > 1]
    best: DelayPattern | None = None
    for period in periods.tolist():
        phases, counts = np.unique(late_steps % period, return_counts=True)
        phase = phases[counts.argmax()]
        hits = late_steps[late_steps % period == phase]
        # The first and the last hit bound the range of the period; the evidence is how many steps between them are hit.
        is_between = (steps >= hits[0]) & (steps <= hits[-1])
        called_for = is_between & (steps % period == phase)
        slots = int(called_for.sum())
        if len(hits) < _MIN_PERIODIC or len(hits) < (1 - _MAX_MISSED_SHARE) * slots:
            continue
        # While all steps are late, those predicted by a period are late as well.
        others = delayed[is_between & ~called_for]
        share = max(len(late_steps) / len(steps), int(others.sum()) / max(1, len(others)))
        chance = float(bdtrc(len(hits) - 3, slots - 2, min(1.0, share)))
        p_value = min(1.0, chance * period * len(periods))
        if p_value <= significance and (best is None or p_value < best.p_value):
            best = DelayPattern(
                kind="periodic",
                where=delayed & called_for,
                usual_ns=usual_ns,
                statistic=f"{len(hits)} of {slots} steps that a period of {period} predicts "
                f"({format_p_value(p_value)})",
                p_value=p_value,
                period=period,
            )
    return best


def _transient(series: Floats, delayed: Mask, usual_ns: float, sigma_ns: float) -> DelayPattern:
    """Return the pattern of delays now and then, which only other ranks can show to be rank-specific."""
    distance = (float(series[delayed].max()) - usual_ns) / sigma_ns if sigma_ns > 0 else math.inf
    count = int(delayed.sum())
    times = f"{count} of {len(series)} steps, up to " if count > 1 else ""
    above = f"{distance:,.0f} standard deviations" if math.isfinite(distance) else "far"
    return DelayPattern(
        kind="transient",
        where=delayed.copy(),
        usual_ns=usual_ns,
        statistic=f"{times}{above} above normal",
        p_value=math.nan,
    )


def count_runs(where: Mask) -> int:
    """Return the number of runs of consecutive True values.

    Example: 2 for [False, True, True, False, True].
    """
    return int((where & ~np.append(False, where[:-1])).sum())


def _mean_ranks(values: Floats) -> Floats:
    """Return the rank of each value from 1; equal values share the mean of their ranks.

    Example: the values [5, 7, 7] have the ranks [1, 2.5, 2.5].
    """
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[index.ravel()]
    return ranks


def _format_sample_size(independent: int, steps: int) -> str:
    return f" of {independent} independent ones" if independent < steps else ""
