"""The account of each step as scalars, for tools that keep the curves of many runs: TensorBoard, MLflow, W&B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pandas as pd

from overlapscope.account.blocks import BLOCKS
from overlapscope.analysis.summary import Summary

PREFIX: Final = "overlapscope/"


Log = Callable[..., object]
"""Takes the scalars of a step by name, and the step as ``step=``, as ``mlflow.log_metrics`` and ``wandb.log`` do."""


def scalars_by_step(summary: Summary) -> pd.DataFrame:
    """What the steps that all ranks have finished consist of, as means of the ranks.

    Returns:
        A row per step, its index; columns ``overlapscope/step_ms``, one for each block that takes any time, which sum
        to it, ``overlapscope/hidden_ms``, and ``overlapscope/overlap_ratio`` (NaN in a step without communication).
    """
    blocks = [f"{name}_ns" for name in BLOCKS]
    finished = summary.figures[summary.figures["step"].isin(summary.alike.finished)]
    means = finished.groupby("step")[["step_time_ns", *blocks, "hidden_ns", "communication_ns"]].mean()
    kept = ["step_time_ns", *(name for name in blocks if means[name].any()), "hidden_ns"]
    ms = (means[kept] / 1e6).rename(columns={"step_time_ns": "step_ns"}).rename(columns=lambda name: f"{name[:-3]}_ms")
    return ms.assign(overlap_ratio=means["hidden_ns"] / means["communication_ns"]).add_prefix(PREFIX)


def log_steps(summary: Summary, log: Log, after_step: int = -1) -> int:
    """Hand over the scalars of each step, in the order of steps.

    Args:
        after_step: only of steps after this one, for a recording that goes on and has been handed over before.

    Returns:
        The last step that has been handed over by now.
    """
    scalars = scalars_by_step(summary)
    scalars = scalars[scalars.index > after_step]
    for step, row in zip(scalars.index, scalars.to_dict("records"), strict=True):
        log({str(name): value for name, value in row.items() if value == value}, step=int(step))  # not NaN
    return max([after_step, *scalars.index.tolist()])
