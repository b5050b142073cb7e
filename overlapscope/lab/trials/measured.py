"""Results of a recorded trial: the same step-time breakdown that every page and command shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overlapscope.analysis.analysis import Analysis
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.reader import read_trace


def analyze_recording(recording: Path) -> Analysis:
    """Analyze the recording of a trial.

    Raises:
        OverlapScopeError: The recording can't be read, or has no step that all ranks have finished and that can be
            compared.
    """
    analysis = Analysis(read_trace(recording))
    if not analysis.summary.steps:
        raise OverlapScopeError(f"{recording}: {analysis.summary.sentence}")
    return analysis


def make_columns(analysis: Analysis) -> dict[str, Any]:
    """Compute the columns of a row: the mean step and its blocks, which sum to it, hidden communication, and all steps.

    Returns:
        step_ns, a column for each of ``BLOCKS``, hidden_ns, and steps_ns: a list with the time of each counted step.
    """
    summary = analysis.summary
    counted = summary.figures[summary.is_steady]
    return {
        "step_ns": summary.mean.step.value,
        **{f"{name}_ns": mean.value for name, mean in summary.mean.blocks.items()},
        "hidden_ns": summary.hidden.value,
        "steps_ns": counted.groupby("step")["step_time_ns"].mean().tolist(),
    }
