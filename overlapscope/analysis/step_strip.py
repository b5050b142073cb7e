"""Overview strip of all steps of a recording: their times on the timeline, and the share of exposed communication."""

from __future__ import annotations

import pandas as pd

from overlapscope.analysis.lanes import Timeline
from overlapscope.analysis.trend import trend_by_step


def build_step_strip(figures: pd.DataFrame, timeline: Timeline) -> pd.DataFrame:
    """Return all steps, merged into as many points as a trend has.

    Args:
        figures: From ``account.figures.figures_of``.

    Returns:
        step, last_step, start_ns, end_ns (on the timeline), exposed_ns and step_time_ns (means), exposed_share.
    """
    exposed = trend_by_step(figures, "exposed_ns")
    step_time = trend_by_step(figures, "step_time_ns")
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
