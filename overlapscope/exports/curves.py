"""The step-time breakdown of each step as scalars for experiment trackers: TensorBoard, MLflow, W&B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pandas as pd

from overlapscope.account.blocks import BLOCKS
from overlapscope.analysis.summary import Summary

PREFIX: Final = "overlapscope/"


LogScalars = Callable[..., object]
"""Callback with a step's scalars by name and the step as ``step=``, like ``mlflow.log_metrics`` and ``wandb.log``."""


def compute_step_scalars(summary: Summary) -> pd.DataFrame:
    """Compute the breakdown of each step that all ranks have finished, as means over the ranks.

    Returns:
        A row per step, indexed by it; columns ``overlapscope/step_ms``, one for each block that takes any time, which
        sum to it, ``overlapscope/hidden_ms``, and ``overlapscope/overlap_ratio`` (NaN in a step without communication).
    """
    blocks = [f"{name}_ns" for name in BLOCKS]
    finished = summary.figures[summary.figures["step"].isin(summary.alike.finished)]
    means = finished.groupby("step")[["step_time_ns", *blocks, "hidden_ns", "communication_ns"]].mean()
    kept = ["step_time_ns", *(name for name in blocks if means[name].any()), "hidden_ns"]
    ms = (means[kept] / 1e6).rename(columns={"step_time_ns": "step_ns"}).rename(columns=lambda name: f"{name[:-3]}_ms")
    return ms.assign(overlap_ratio=means["hidden_ns"] / means["communication_ns"]).add_prefix(PREFIX)


def log_steps(summary: Summary, log: LogScalars, after_step: int = -1) -> int:
    """Log the scalars of each step, in order of steps.

    Args:
        after_step: log only later steps, for a live recording that has been logged before.

    Returns:
        The last step logged so far.
    """
    scalars = compute_step_scalars(summary)
    scalars = scalars[scalars.index > after_step]
    for step, row in zip(scalars.index, scalars.to_dict("records"), strict=True):
        log({str(name): value for name, value in row.items() if value == value}, step=int(step))  # not NaN
    return max([after_step, *scalars.index.tolist()])
