"""How a delay is spread over the steps: in all of them, every k-th, from one step on, in stretches, or now and then.

A series is how much longer a rank takes than the others do, one value per cycle; noise makes it longer as often as
shorter. What is usual is estimated from its lower half, which holds as long as fewer than half of the values are
delayed. Every pattern comes with the statistic that shows it, and with the probability that noise alone would show as
much. Noise that lasts for some steps on end shows more, so neighbours that are alike count for as many steps as are
independent; but noise that is far from 0 throughout, and hardly varies, would have to last many times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from overlapscope.account.means import independent_steps
from overlapscope.analysis.chance import chance_of_at_least, chance_of_runs

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Kind = Literal["persistent", "shift", "stretch", "periodic", "transient"]

SIGNIFICANCE: Final = 1e-4
"""A pattern of a series on its own is named if noise would show as much with at most this probability, counting all
tries of a search. Who looks at many series has to ask for less."""

DELAY_SIGMAS: Final = 6.0
"""A value this many standard deviations above normal is delayed."""

_CAUTIOUS_SIGMAS: Final = 1.0
"""By so many standard errors neighbours are taken to be more alike than they seem."""
_LEAST_VALUES: Final = 5
"""Fewer cycles than this on one side of a change say nothing."""
_LEAST_PERIODIC: Final = 4
"""Fewer delays than this make no period."""
_LOW, _MIDDLE = 0.10, 0.40
_SIGMAS_BETWEEN: Final = 1.0282
"""Distance, in a normal distribution, from one of these quantiles to the other, and from the second to the mean."""
_SIGMAS_TO_MEAN: Final = 0.2533
_FEW_VALUES: Final = 15
"""Number of values at which the standard deviation may well be twice what it seems."""
_MAD_TO_SIGMA: Final = 1.4826
_STEADY_SHARE: Final = 1 / 50
"""A delay that varies by at most this share of itself is not what noise would come to: of first-order autoregressive
series of 20 values with a correlation of 0.99, fewer than 1 in 100,000 are as steady, and as far from 0."""
_APART: Final = 6.0
"""Delays in stretches are so many times as long as what is left when they are taken out. In normal noise that is cut in
two at its mean the halves are 2.3 times as far apart, and in a series that only rises 2.7 times."""
_FIRST_CUT_SIGMAS: Final = 3.0
_MOST_MISSED: Final = 0.25
"""Maximum share of the delays that a period predicts that may be missing."""
_SMALLEST_TO_LARGEST: Final = 0.1


@dataclass(frozen=True, eq=False, kw_only=True)
class DelayPattern:
    """Some values of a series and what they have in common."""

    kind: Kind
    where: Mask
    """(S,) which values are delayed."""
    usual_ns: float
    """What the series is without the delay: 0 if it is delayed all the time."""
    statistic: str
    """The evidence in words."""
    p_value: float
    """The probability that noise alone would show as much; 0 if too small for a float. NaN for what comes now and then:
    that is a fact about some steps, and says nothing of others."""
    period: int | None = None
    """Steps from one delay to the next, if periodic."""


def find_patterns(
    series_ns: npt.ArrayLike,
    steps: npt.NDArray[np.int64],
    least_ns: float,
    *,
    significance: float = SIGNIFICANCE,
    others: str = "the others",
) -> list[DelayPattern]:
    """Name what is unusual about a series: at most one lasting delay, and what comes on top of it.

    Args:
        series_ns: (S,) by cycle.
        steps: (S,) ascending numbers of the steps.
        least_ns: smaller delays don't matter.
        significance: noise would show as much with at most this probability.
        others: what the series is compared with, in words.
    """
    series = np.asarray(series_ns, dtype=np.float64)
    found: list[DelayPattern] = []
    rest = series
    change = _change_of(series)
    shift = None if change is None else _shift(series, change, steps, least_ns, significance)
    stretches = _stretches(series, least_ns, significance)
    if (lasting := _better_of(shift, stretches)) is not None:
        found.append(lasting)
        rest = np.where(lasting.where, series - np.median(series[lasting.where]) + lasting.usual_ns, series)
    elif (persistent := _persistent(series, change, least_ns, significance, others)) is not None:
        found.append(persistent)
    usual_ns, sigma_ns = usual_of(rest)
    delayed = rest > usual_ns + max(DELAY_SIGMAS * sigma_ns, least_ns)
    periodic = _periodic(delayed, steps, usual_ns, significance)
    if periodic is not None:
        found.append(periodic)
        delayed &= ~periodic.where
    if delayed.any():
        # Hiccups of milliseconds are a different, and minor, matter than a pause of seconds.
        delayed &= rest - usual_ns >= _SMALLEST_TO_LARGEST * (rest[delayed].max() - usual_ns)
        found.append(_transient(rest, delayed, usual_ns, sigma_ns))
    return found


def usual_of(series_ns: Floats) -> tuple[float, float]:
    """Mean of the values that are not delayed, assuming a normal distribution, and a cautious standard deviation."""
    low, middle = np.quantile(series_ns, [_LOW, _MIDDLE])
    sigma = (middle - low) / _SIGMAS_BETWEEN
    return float(middle + _SIGMAS_TO_MEAN * sigma), float(sigma) * (1 + _FEW_VALUES / len(series_ns))


def _persistent(
    series: Floats, change: _Change | None, least_ns: float, significance: float, others: str
) -> DelayPattern | None:
    """Delayed in most cycles, by the sign test, of as many cycles as are independent."""
    late, early = int((series > 0).sum()), int((series < 0).sum())
    # A change of level makes neighbours alike, but is no noise.
    has_levels = change is not None and change.p_value <= significance
    share = change.independent_share if change is not None and has_levels else _independent_share(series, 1)
    if series.std() <= _STEADY_SHARE * abs(series.mean()):
        share = 1.0
    tries = math.floor((late + early) * share)
    p_value = chance_of_at_least(math.floor(late * share), tries, 0.5)
    # Not the median: if every other step is delayed, that may be a delayed one.
    if float(np.quantile(series, _MIDDLE)) < least_ns or p_value > significance:
        return None
    return DelayPattern(
        kind="persistent",
        where=np.ones(len(series), dtype=bool),
        usual_ns=0.0,
        statistic=f"longer than {others} in {late} of {len(series)} steps "
        f"(sign test{_of_independent(tries, late + early)}, {_p_text(p_value)})",
        p_value=p_value,
    )


@dataclass(frozen=True, kw_only=True)
class _Change:
    """The cycle that divides a series best into two levels."""

    at: int
    distance: float
    """Of the Mann-Whitney test, in standard deviations, if all cycles were independent."""
    tries: int
    """How many cycles it might have been."""
    independent_share: float
    """How many cycles are independent of each other within the levels, as a share of all."""

    @property
    def p_value(self) -> float:
        """The probability that noise would divide it as clearly."""
        distance = self.distance * math.sqrt(self.independent_share)
        return min(1.0, math.erfc(distance / math.sqrt(2)) * self.tries)


def _change_of(series: Floats) -> _Change | None:
    """None if the series is too short."""
    count = len(series)
    if count < 2 * _LEAST_VALUES:
        return None
    before_count = np.arange(1, count + 1)
    rank_sum = np.cumsum(_mean_ranks(series)) - before_count * (count + 1) / 2
    deviation = np.sqrt(before_count * (count - before_count) * (count + 1) / 12)
    tried = slice(_LEAST_VALUES - 1, count - _LEAST_VALUES)
    distances = np.abs(rank_sum[tried]) / deviation[tried]
    at = _refined(series, int(distances.argmax()) + _LEAST_VALUES)
    levels = np.concatenate([part - part.mean() for part in (series[:at], series[at:])])
    return _Change(
        at=at,
        distance=float(distances.max()),
        tries=len(distances),
        independent_share=_independent_share(levels, 2),
    )


def _independent_share(series: Floats, levels: int) -> float:
    found = independent_steps(series[:, None], levels=levels, sigmas=_CAUTIOUS_SIGMAS)
    return float(found[0]) / len(series)


def _shift(
    series: Floats, change: _Change, steps: npt.NDArray[np.int64], least_ns: float, significance: float
) -> DelayPattern | None:
    """From one step on longer than before, or until one step: the Mann-Whitney test, for every step it might be.

    Neighbours that are alike within the two levels make its statistic as small as that of as many independent steps.
    """
    count = len(series)
    before, after = series[: change.at], series[change.at :]
    p_value = change.p_value
    is_late_after = np.median(after) > np.median(before)
    usual, late = (before, after) if is_late_after else (after, before)
    usual_ns, rise_ns = float(np.median(usual)), float(np.median(late) - np.median(usual))
    deviations = np.concatenate([np.abs(part - np.median(part)) for part in (before, after)])
    noise_ns = _MAD_TO_SIGMA * float(np.median(deviations))
    # A rank that is late throughout, and varies, is late all the time; drifting noise is no step.
    if p_value > significance or rise_ns < max(least_ns, 2 * noise_ns) or usual_ns > rise_ns / 2:
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
        f"(Mann-Whitney test{_of_independent(independent, count)}, {_p_text(p_value)})",
        p_value=p_value,
    )


def _refined(series: Floats, change: int) -> int:
    """The step that separates the two levels best. Ranks alone are some steps off: order within a level counts."""
    nearer_after = np.abs(series - np.median(series[:change])) - np.abs(series - np.median(series[change:]))
    tried = np.cumsum(nearer_after)[_LEAST_VALUES - 1 : len(series) - _LEAST_VALUES]
    return int(tried.argmin()) + _LEAST_VALUES


def _stretches(series: Floats, least_ns: float, significance: float) -> DelayPattern | None:
    """Delayed for some steps on end, once or more often, and usual otherwise.

    That is a series of two levels which are far apart, from one step to the next, whose delayed values are in fewer
    runs than chance would put them in, of as many values as are independent within the levels.
    """
    usual_ns, sigma_ns = usual_of(series)
    cut_ns = usual_ns + max(_FIRST_CUT_SIGMAS * sigma_ns, least_ns)
    for _ in range(2):  # the first cut says which values are delayed about, and these where the levels are
        delayed = series > cut_ns
        if not _LEAST_VALUES <= delayed.sum() <= len(series) - _LEAST_VALUES:
            return None
        usual_ns, late_ns = float(np.median(series[~delayed])), float(np.median(series[delayed]))
        cut_ns = (usual_ns + late_ns) / 2
    rise_ns = late_ns - usual_ns
    levels = series - np.where(delayed, late_ns, usual_ns)
    if rise_ns < max(least_ns, _APART * _MAD_TO_SIGMA * float(np.median(np.abs(levels)))) or usual_ns > rise_ns / 2:
        return None
    into_or_out = np.flatnonzero(delayed[1:] != delayed[:-1])
    if float(np.median(np.abs(np.diff(series)[into_or_out]))) < rise_ns / 2:  # noise that lasts comes and goes slowly
        return None
    runs = runs_of(delayed)
    share = _independent_share(levels, 2)
    p_value = chance_of_runs(runs, math.floor(delayed.sum() * share), math.floor(len(series) * share))
    if p_value > significance:
        return None
    return DelayPattern(
        kind="stretch",
        where=delayed,
        usual_ns=usual_ns,
        statistic=f"{delayed.sum()} steps are {rise_ns / 1e6:.2f} ms longer, in {runs} "
        f"stretch{'es' * (runs > 1)} of steps (runs test, {_p_text(p_value)})",
        p_value=p_value,
    )


def _better_of(shift: DelayPattern | None, stretches: DelayPattern | None) -> DelayPattern | None:
    """Stretches, if there are too many values that a single change says the wrong thing of."""
    if shift is None or stretches is None:
        return shift or stretches
    return stretches if (shift.where != stretches.where).sum() >= _LEAST_VALUES else shift


def _periodic(delayed: Mask, steps: npt.NDArray[np.int64], usual_ns: float, significance: float) -> DelayPattern | None:
    """At equal distances: more of the steps that a period calls for are delayed than chance would have it."""
    late_steps = steps[delayed]
    periods = np.unique(np.diff(late_steps))
    periods = periods[periods > 1]
    best: DelayPattern | None = None
    for period in periods.tolist():
        phases, counts = np.unique(late_steps % period, return_counts=True)
        phase = phases[counts.argmax()]
        hits = late_steps[late_steps % period == phase]
        # The first and the last hit say how far the period reaches; what counts is how much of it is hit.
        is_between = (steps >= hits[0]) & (steps <= hits[-1])
        called_for = is_between & (steps % period == phase)
        slots = int(called_for.sum())
        if len(hits) < _LEAST_PERIODIC or len(hits) < (1 - _MOST_MISSED) * slots:
            continue
        # Where all steps are late for a while, those that a period calls for are as well.
        others = delayed[is_between & ~called_for]
        share = max(len(late_steps) / len(steps), int(others.sum()) / max(1, len(others)))
        chance = chance_of_at_least(len(hits) - 2, slots - 2, share)
        p_value = min(1.0, chance * period * len(periods))
        if p_value <= significance and (best is None or p_value < best.p_value):
            best = DelayPattern(
                kind="periodic",
                where=delayed & called_for,
                usual_ns=usual_ns,
                statistic=f"{len(hits)} of {slots} steps that a period of {period} predicts ({_p_text(p_value)})",
                p_value=p_value,
                period=period,
            )
    return best


def _transient(series: Floats, delayed: Mask, usual_ns: float, sigma_ns: float) -> DelayPattern:
    """Now and then. Whose doing that is can only be told from the other ranks."""
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


def runs_of(where: Mask) -> int:
    """How often some begin that are one after the other."""
    return int((where & ~np.append(False, where[:-1])).sum())


def _mean_ranks(values: Floats) -> Floats:
    """The rank of each value from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[place.ravel()]
    return ranks


def _of_independent(independent: int, steps: int) -> str:
    return f" of {independent} independent ones" if independent < steps else ""


def _p_text(p_value: float) -> str:
    return "p < 1e-12" if p_value < 1e-12 else f"p = {p_value:.1g}"
