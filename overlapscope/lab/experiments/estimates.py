"""Estimates with intervals from repetitions, and sentences that claim no more than these support."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.means import student_quantile
from overlapscope.interval import SIGMAS_90, Interval
from overlapscope.lab.experiments.charts import StackedBar, has_interval
from overlapscope.text import count_of, format_count, format_share_range

MIN_REPETITIONS: Final = 3
"""Minimum number of repetitions for an interval."""
_TITLE_PARTS: Final[Mapping[str, Callable[[Any], str]]] = {
    "ranks": lambda ranks: count_of(int(ranks), "rank"),
    "batch": lambda batch: f"batch {batch:g}",
    "learning_rate": lambda rate: f"learning rate {rate:g}",
    "total_elements": lambda count: f"{format_count(int(count))} float32 values in all",
}
"""Texts of settings that don't speak for themselves."""


def select_rows(rows: pd.DataFrame, **settings: Any) -> pd.DataFrame:
    """Select the rows with these settings, one per repetition, in their order. None selects rows without a value."""
    chosen = pd.Series(True, index=rows.index)
    for name, value in settings.items():
        chosen &= rows[name].isna() if value is None else rows[name] == value
    return rows[chosen].drop_duplicates("repetition", keep="last").sort_values("repetition")


def estimate_mean(values: Sequence[float]) -> Interval:
    """Estimate the mean of repetitions and its 90 % interval, which is NaN with fewer than ``MIN_REPETITIONS``.

    Each repetition is a separate training, and their order is random: unlike neighboring steps they are independent.
    """
    count, mean = len(values), float(np.mean(values)) if len(values) else math.nan
    if count < MIN_REPETITIONS:
        return Interval(value=mean, low=math.nan, high=math.nan)
    (quantile,) = student_quantile(np.array([count - 1.0]), SIGMAS_90).tolist()
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(value=mean, low=mean - half, high=mean + half)


def estimate_step(rows: pd.DataFrame) -> Interval:
    """Estimate the step time of one setting."""
    return estimate_mean(rows["step_ns"].tolist())


def make_stacked_bar(label: str, rows: pd.DataFrame) -> StackedBar:
    """Compute the breakdown of one setting's step."""
    parts = {name: float(rows[f"{name}_ns"].mean()) for name in BLOCKS}
    return StackedBar(label=label, parts_ns={name: ns for name, ns in parts.items() if ns}, step_ns=estimate_step(rows))


def estimate_change(base: pd.DataFrame, new: pd.DataFrame, column: str = "step_ns") -> Interval:
    """Estimate by which share the time of one setting differs from another's, over repetitions that both have.

    The settings of one repetition are measured shortly after each other, so slow drift cancels. The mean is one of
    logarithms, in which twice and half as long are equally far from no change.

    Returns:
        Negative if the new setting takes less; NaN if they have no repetition in common.
    """
    both = base.set_index("repetition")[column].to_frame("base").join(new.set_index("repetition")[column], how="inner")
    logarithm = estimate_mean(np.log(both[column] / both["base"]).tolist())
    value, low, high = np.expm1([logarithm.value, logarithm.low, logarithm.high]).tolist()
    return Interval(value=value, low=low, high=high)


def is_significant(difference: Interval) -> bool:
    """Return True if a difference is significant: its interval excludes zero."""
    return has_interval(difference) and (difference.low > 0 or difference.high < 0)


def format_difference(
    what: str,
    difference: Interval,
    than: str,
    *,
    is_plural: bool = False,
) -> str:
    """Format a difference as a sentence, without a full stop.

    Args:
        what: Subject that is compared with ``than``.
        is_plural: True if ``what`` is plural.

    Example::

        three groups take 12.0 % less (9.5 to 14.1 %) than one
    """
    if np.isnan(difference.value):
        return f"{what} and {than} have no repetition in common"
    word = "less" if difference.value < 0 else "longer"
    amount = f"{what} {'take' if is_plural else 'takes'} {100 * abs(difference.value):.1f} % {word} than {than}"
    if not has_interval(difference):
        return f"{amount} (of too few repetitions to be sure)"
    if not is_significant(difference):
        return f"{what} and {than} can't be told apart ({format_share_range(difference)})"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{amount} ({100 * low:.1f} to {100 * high:.1f} %)"


def format_share_ci(value: Interval) -> str:
    """Format a share with its interval: ``38.0 % (35.1 to 41.0 %)``."""
    if not has_interval(value):
        return f"{100 * value.value:.1f} %"
    return f"{100 * value.value:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f} %)"


def group_rows(rows: pd.DataFrame, *names: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Group the rows by the values of some columns, sorted.

    Returns:
        The setting of each group, as the title of a chart or the subject of a sentence: ``convnet, 2 ranks, gloo``;
        and its rows.
    """
    for values, group in rows.groupby(list(names), sort=True, dropna=False):
        setting = dict(zip(names, values, strict=True))
        yield ", ".join(_TITLE_PARTS.get(name, str)(value) for name, value in setting.items()), group


def select_by(rows: pd.DataFrame, name: str) -> dict[Any, pd.DataFrame]:
    """Select the rows of each value of a setting, sorted by it."""
    return {value: select_rows(rows, **{name: value}) for value in sorted(rows[name].unique().tolist())}
