"""Bokeh columns of the ideal over the timeline, from ideal cycles."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import Columns
from overlapscope.analysis.ideal import IdealCycles
from overlapscope.analysis.lanes import Timeline
from overlapscope.units import format_ns

OUTLINE_COLUMNS: Final = ("left", "right", "top", "bottom")
IDEAL_END_COLUMNS: Final = ("x", "label")

_MIN_OUTLINE_PX: Final = 4
_SENTENCE_PX: Final = 240
_NUMBER_PX: Final = 130


def build_outline_columns(ideal: IdealCycles, timeline: Timeline, layout: LaneLayout, ns_per_px: float) -> Columns:
    """Return the ideal's phases and collectives as rectangles, in the lanes of every rank that it applies to."""
    segments = {"phases": ideal.phases, "communication": ideal.collectives}
    lanes = [
        _outline_lane(segments[lane.name], layout.lane_px(number), timeline.begin_ns, ns_per_px)
        for number, lane in enumerate(timeline.lanes)
        if lane.name in segments and lane.rank in ideal.ranks
    ]
    return {name: np.concatenate([lane[name] for lane in lanes] or [[]]) for name in OUTLINE_COLUMNS}


def build_ideal_end_columns(ideal: IdealCycles, begin_ns: int, ns_per_px: float) -> Columns:
    """Return where each cycle would have ended, and how much earlier, if there is room.

    Args:
        ideal: the ideal cycles.
        begin_ns: start of the timeline on the common clock.
        ns_per_px: duration of a pixel.
    """
    cycles = ideal.cycles
    ends_ns = cycles["begin_ns"] + cycles["ideal_ns"] - begin_ns
    gains_ns = (cycles["recorded_ns"] - cycles["ideal_ns"]).tolist()
    widths_px = (cycles["ideal_ns"] / ns_per_px).tolist()
    return {
        "x": ends_ns.to_numpy(dtype=np.float64),
        "label": [_format_gain(gain_ns, width_px) for gain_ns, width_px in zip(gains_ns, widths_px, strict=True)],
    }


def _outline_lane(segments: pd.DataFrame, lane_px: tuple[int, int], begin_ns: int, ns_per_px: float) -> Columns:
    shown = segments[segments["end_ns"] - segments["start_ns"] >= _MIN_OUTLINE_PX * ns_per_px]
    return {
        "left": (shown["start_ns"] - begin_ns).to_numpy(dtype=np.float64),
        "right": (shown["end_ns"] - begin_ns).to_numpy(dtype=np.float64),
        "top": np.full(len(shown), lane_px[0] + 1, dtype=np.float32),
        "bottom": np.full(len(shown), lane_px[1] - 1, dtype=np.float32),
    }


def _format_gain(gain_ns: int, width_px: float) -> str:
    if width_px < _NUMBER_PX:
        return ""
    if width_px < _SENTENCE_PX:
        return ("\N{MINUS SIGN}" if gain_ns >= 0 else "+") + format_ns(abs(gain_ns))
    return f"ideal end: {format_ns(abs(gain_ns))} {'earlier' if gain_ns >= 0 else 'later'}"
