"""Bokeh columns of the rounds of all-reduces: strips along their lower edge."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import Columns, View, compute_rows_px, make_empty_columns
from overlapscope.analysis.lanes import Lane, Timeline
from overlapscope.analysis.rounds import Rounds

ROUND_COLUMNS: Final = ("left", "right", "top", "bottom", "alpha", "lane", "row", "place")

_MIN_WIDTH_PX: Final = 3
_HEIGHT_SHARE: Final = 0.4
_ALPHAS: Final = (0.35, 0.7)
"""Opacity of phases, alternating."""


def build_round_columns(
    rounds: Rounds, timeline: Timeline, layout: LaneLayout, view: View, ns_per_px: float
) -> Columns:
    """Return every round in view that is wide enough to be distinguished from its neighbors.

    Concurrent reductions, such as those of two trees, are above each other.
    """
    parts = [
        _build_lane_columns(rounds, lane, number, timeline.begin_ns, layout, view, ns_per_px)
        for number, lane in enumerate(timeline.lanes)
        if lane.name == "communication"
    ]
    parts = [part for part in parts if len(part["left"])]
    if not parts:
        return make_empty_columns(*ROUND_COLUMNS)
    return {name: np.concatenate([part[name] for part in parts]) for name in ROUND_COLUMNS}


def _build_lane_columns(
    rounds: Rounds, lane: Lane, number: int, begin_ns: int, layout: LaneLayout, view: View, ns_per_px: float
) -> Columns:
    found = rounds.in_view(lane.rank, view[0] + begin_ns, view[1] + begin_ns)
    found = found[found["end_ns"] - found["start_ns"] >= _MIN_WIDTH_PX * ns_per_px]
    if found.empty:
        return make_empty_columns(*ROUND_COLUMNS)
    order = np.argsort(lane.spans.rows)
    at = order[np.searchsorted(lane.spans.rows, found["row"], sorter=order)]
    top, bottom = compute_rows_px(layout, number, lane.spans.stack[at], lane.spans.stack_heights[at])
    lanes = found.groupby("row")["lane"].transform("max").to_numpy() + 1
    height = _HEIGHT_SHARE * (bottom - top) / lanes
    first = bottom - height * (lanes - found["lane"].to_numpy())
    return {
        "left": (found["start_ns"] - begin_ns).to_numpy(dtype=np.float64),
        "right": (found["end_ns"] - begin_ns).to_numpy(dtype=np.float64),
        "top": first.astype(np.float32),
        "bottom": (first + height).astype(np.float32),
        "alpha": np.take(_ALPHAS, _index_phases(found) % len(_ALPHAS)).astype(np.float32),
        "lane": np.full(len(found), number, dtype=np.int32),
        "row": found["row"].to_numpy(dtype=np.int32),
        "place": found.index.to_numpy(dtype=np.int32),
    }


def _index_phases(found: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the index of each round's phase within its reduction, from 0."""
    of_sum = found.groupby(["row", "lane"])["phase"]
    return of_sum.transform(lambda phases: pd.factorize(phases)[0]).to_numpy(dtype=np.int64)
