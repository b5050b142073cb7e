"""Trends of a recording's figures over its steps, for all ranks and for each rank."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

MAX_POINTS: Final = 600
"""Maximum number of points: more steps are merged, equally many per point."""


def trend_by_step(per_step: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the trend of one figure over the steps of a recording.

    Args:
        per_step: From ``account.figures.figures_of``.
        column: The figure.

    Returns:
        step (the first of those merged), last_step, low, mean, high: over all ranks and steps of a point. Points
        without a value, such as the ratio of steps without communication, are left out.
    """
    known = per_step.loc[per_step[column].notna(), ["step", column]]
    points = known.assign(point=_point_of(per_step, known["step"])).groupby("point")
    return points.agg(
        step=("step", "min"),
        last_step=("step", "max"),
        low=(column, "min"),
        mean=(column, "mean"),
        high=(column, "max"),
    ).reset_index(drop=True)


def trend_by_rank(per_step: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the trend of each rank separately, at the same points.

    Returns:
        rank, step, mean.
    """
    known = per_step.loc[per_step[column].notna(), ["rank", "step", column]]
    points = known.assign(point=_point_of(per_step, known["step"])).groupby(["rank", "point"])
    return points.agg(step=("step", "min"), mean=(column, "mean")).reset_index()[["rank", "step", "mean"]]


def _point_of(per_step: pd.DataFrame, steps: pd.Series[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    numbers = np.unique(per_step["step"])
    each = -(-len(numbers) // MAX_POINTS)
    return np.searchsorted(numbers, steps.to_numpy()) // max(1, each)
