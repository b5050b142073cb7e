"""Trends of a recording's figures over its steps: neighboring steps merged into points, none across a break."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.lanes import Timeline
from overlapscope.breakdown.spans import Int64Array

MAX_STRIP_POINTS: Final = 600
"""Maximum number of points of a strip, or of a line of means."""
_BREAK_POINTS: Final = 3
"""Number of points from which missing steps are a break in the trend, as where recording was off."""
_MAX_BREAKS: Final = 50


def trend_by_step(
    per_step: pd.DataFrame, column: str, max_points: int = MAX_STRIP_POINTS, first_step: int = 0
) -> pd.DataFrame:
    """Return the trend of one figure over the steps of a recording.

    Example: two steps of two ranks with 1 and 3, and with 2 and 8, are one point with a low of 1, a usual_low of 1.5, a
    mean of 3.5, a middle of 3.5, a usual_high of 5.5 and a high of 8.

    Args:
        per_step: From ``tabulate_breakdown``.
        column: The figure.
        max_points: About how many points there are at most: of more steps, equally many are merged into a point.
        first_step: A step at which a point begins, as after the warm-up.

    Returns:
        step (the first of those merged), last_step, low and high (over all ranks and steps of a point), usual_low,
        middle and usual_high (medians over its steps, of the lowest rank, the mean over ranks, and the highest rank),
        mean. Points without a value, such as the ratio of steps without communication, are left out.
    """
    known = per_step.loc[per_step[column].notna(), ["step", column]]
    of_step = known.groupby("step")[column].agg(low="min", mean="mean", high="max").reset_index()
    points = of_step.groupby(_find_points(np.unique(per_step["step"]), of_step["step"], max_points, first_step))
    return points.agg(
        step=("step", "min"),
        last_step=("step", "max"),
        low=("low", "min"),
        usual_low=("low", "median"),
        middle=("mean", "median"),
        mean=("mean", "mean"),
        usual_high=("high", "median"),
        high=("high", "max"),
    ).reset_index(drop=True)


def _find_points(numbers: Int64Array, steps: pd.Series[int], max_points: int, first_step: int) -> Int64Array:
    """Return the point of each of some steps; ``numbers`` are all steps."""
    each = count_steps_per_point(numbers, max_points)
    begins = np.flatnonzero(_follows_break(numbers, each) | (numbers == first_step))  # a point begins anew there
    at = np.arange(len(numbers))
    piece = np.searchsorted(begins, at, side="right")
    within = at - np.concatenate([[0], begins])[piece]
    point = (piece * len(numbers) + within // each)[np.searchsorted(numbers, steps.to_numpy())]
    found: Int64Array = point.astype(np.int64)
    return found


def count_steps_per_point(numbers: Int64Array, max_points: int) -> int:
    """Return how many of these steps are merged into a point."""
    return max(1, -(-len(numbers) // max_points))


def _follows_break(numbers: Int64Array, each: int) -> npt.NDArray[np.bool_]:
    """Return which steps follow so many missing ones that no line should lead across."""
    is_first = np.append(False, np.diff(numbers) > _BREAK_POINTS * each)[: len(numbers)]
    return is_first if is_first.sum() <= _MAX_BREAKS else np.zeros(len(numbers), dtype=bool)


def add_breaks(points: pd.DataFrame, each: int) -> pd.DataFrame:
    """Add a point without a value in the middle of each break, so that lines end before it and begin anew after it.

    Args:
        points: From ``trend_by_step``.
        each: Number of steps per point.
    """
    step, last = points["step"].to_numpy(np.int64), points["last_step"].to_numpy(np.int64)
    missing = step[1:] - last[:-1] - 1
    is_break = missing >= _BREAK_POINTS * each
    if not is_break.any() or is_break.sum() > _MAX_BREAKS:
        return points
    breaks = pd.DataFrame(
        {"step": last[:-1][is_break] + 1 + missing[is_break] // 2, "last_step": step[1:][is_break] - 1}
    )
    return pd.concat([points, breaks]).sort_values("step", kind="stable", ignore_index=True)


def build_step_strip(figures: pd.DataFrame, timeline: Timeline, max_points: int = MAX_STRIP_POINTS) -> pd.DataFrame:
    """Return all steps, merged into as many points as a trend has.

    Args:
        figures: From ``tabulate_breakdown``.
        timeline: Timeline on which the steps are.
        max_points: As for ``trend_by_step``.

    Returns:
        step, last_step, start_ns, end_ns (on the timeline), exposed_ns and step_time_ns (means), exposed_share.
    """
    exposed = trend_by_step(figures, "exposed_ns", max_points)
    step_time = trend_by_step(figures, "step_time_ns", max_points)
    bounds = timeline.steps.drop_duplicates("step").set_index("step")
    found = pd.DataFrame(
        {
            "step": exposed["step"],
            "last_step": exposed["last_step"],
            "start_ns": exposed["step"].map(bounds["start_ns"]),
            "end_ns": exposed["last_step"].map(bounds["end_ns"]),
            "exposed_ns": exposed["mean"],
            "step_time_ns": step_time["mean"],
        }
    )
    found["exposed_share"] = found["exposed_ns"] / found["step_time_ns"].where(found["step_time_ns"] > 0)
    return found.dropna(ignore_index=True)
