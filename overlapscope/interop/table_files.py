"""Tables for other tools: those of a recording as CSV or Parquet files, and steps as scalars for trackers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Final, Literal

import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.summary import Summary

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
    finished = summary.figures[summary.figures["step"].isin(summary.steady.finished)]
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


TableFormat = Literal["csv", "parquet"]

_ROWS: Final = 20_000
"""Number of rows converted to CSV at a time, so that a table of millions is not in memory as text too."""


def collect_tables(analysis: Analysis) -> dict[str, pd.DataFrame]:
    """Return the non-empty tables of a recording by name: ``breakdown`` (breakdown of each step) and those recorded."""
    trace = analysis.trace
    tables = {
        "breakdown": analysis.summary.figures.assign(is_counted=analysis.summary.is_steady),
        **{name: getattr(trace, name) for name in ("ranks", "steps", "phases", "gradients", "copies", "collectives")},
        **{name: getattr(trace, name) for name in ("segments", "user_collectives", "pauses", "incidents", "links")},
        **{name: getattr(trace, name) for name in ("plans", "call_sites", "modes")},
    }
    return {name: table for name, table in tables.items() if len(table)}


def encode_table(table: pd.DataFrame, kind: TableFormat) -> Iterator[bytes]:
    """Generate a table as the content of a file; as CSV, some rows at a time."""
    if kind == "parquet":
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        yield buffer.getvalue()
        return
    for begin in range(0, max(1, len(table)), _ROWS):
        rows = table.iloc[begin : begin + _ROWS]
        yield rows.to_csv(index=False, header=not begin, lineterminator="\n").encode()
