"""Bokeh columns of a view of the timeline, from the lanes of a recording."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dashboards.plots.lane_layout import LaneLayout
from dashboards.theme import SHADES
from overlapscope.account.wording import PHASE_LABELS
from overlapscope.analysis.density import NO_CATEGORY, pixel_edges
from overlapscope.analysis.lanes import CATEGORIES, Lane, Timeline, bucket_categories, colors_and_patterns

Columns = dict[str, Any]
View = tuple[int, int]
"""Start and end of a view, in nanoseconds from the start of the recording."""

SPAN_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "pattern", "alpha", "lane", "row")
SHADE_COLUMNS: Final = ("image", "x", "y", "dw", "dh")
LABEL_COLUMNS: Final = ("x", "y", "text", "category")

_STEP_LINE_PX: Final = 76
_LABEL_PX_PER_LETTER: Final = 6.4
_MIN_LABELLED_HEIGHT_PX: Final = 11


def make_empty_columns(*names: str) -> Columns:
    """Return columns without rows."""
    return {name: [] for name in names}


def build_span_columns(timeline: Timeline, layout: LaneLayout, view: View, pixel_ns: float) -> Columns:
    """Return every span in view as a rectangle; concurrent spans share the height of their lane.

    ``pixel_ns`` is the minimum width of a rectangle, so that instants and short spans are visible. Outlines would do
    that too, but double the time that the browser needs to draw.
    """
    parts = [_build_lane_spans(lane, number, layout, view, pixel_ns) for number, lane in enumerate(timeline.lanes)]
    return {name: np.concatenate([part[name] for part in parts]) for name in SPAN_COLUMNS}


def build_shade_columns(
    timeline: Timeline, layout: LaneLayout, view: View, pixels: int, *, without: View | None
) -> Columns:
    """Return one image of all lanes, ``pixels`` wide: color by category, shade by how busy a pixel is.

    The range ``without`` is left blank, because single spans are drawn there.
    """
    edges_ns = pixel_edges(*view, pixels)
    picture = np.zeros((layout.units, len(edges_ns) - 1), dtype=np.uint8)
    for number, lane in enumerate(timeline.lanes):
        busy_ns, category = lane.spans.pixels(edges_ns)
        colour, _ = colors_and_patterns(category)
        share = busy_ns / np.diff(edges_ns)
        if lane.is_instants:
            begun = lane.spans.begun(edges_ns)
            share = begun / max(1, begun.max())
        # Rounded up: the shortest span leaves a mark.
        shade = np.ceil(share * (SHADES - 1)).astype(np.uint8)
        first, after = layout.lane_units(number)
        picture[first:after] = np.where(category == NO_CATEGORY, 0, colour * np.uint8(SHADES) + shade)
    if without is not None:
        picture[:, (edges_ns[1:] > without[0]) & (edges_ns[:-1] < without[1])] = 0
    width_ns = float(edges_ns[-1] - edges_ns[0])
    return {"image": [picture], "x": [float(edges_ns[0])], "y": [0], "dw": [width_ns], "dh": [layout.height_px]}


_OTHER_COLLECTIVE_LABELS: Final = {"broadcast": "buffers", "all_reduce": "used parameters"}
"""Label of a collective that is not a bucket's, by operation."""


def build_label_columns(
    timeline: Timeline, spans: Columns, view: View, width_px: int, collectives: pd.DataFrame
) -> Columns:
    """Return the name of each phase and collective whose rectangle (of ``spans``) is wide enough to hold it."""
    ns_per_px = (view[1] - view[0]) / max(1, width_px)
    visible_from = np.maximum(spans["left"], view[0])
    visible_px = (np.minimum(spans["right"], view[1]) - visible_from) / ns_per_px
    labels = make_empty_columns(*LABEL_COLUMNS)
    roomy = (visible_px > 30) & (spans["bottom"] - spans["top"] >= _MIN_LABELLED_HEIGHT_PX)
    for at in np.flatnonzero(roomy):
        text = format_span_label(
            timeline.lanes[spans["lane"][at]], spans["category"][at], spans["row"][at], collectives
        )
        if text and len(text) * _LABEL_PX_PER_LETTER + 10 < visible_px[at]:
            labels["x"].append(float(visible_from[at] + 5 * ns_per_px))
            labels["y"].append(float(spans["top"][at] + spans["bottom"][at]) / 2)
            labels["text"].append(text)
            labels["category"].append(int(spans["category"][at]))
    return labels


def format_span_label(lane: Lane, category: int, row: int, collectives: pd.DataFrame) -> str:
    """Return the name of the phase or collective in a row of its lane; empty for spans without a name."""
    if lane.name == "phases":
        return PHASE_LABELS[CATEGORIES[category]]
    if lane.name != "communication":
        return ""
    collective = collectives.iloc[row]
    bucket = collective["bucket"]
    if bucket < 0:
        return _OTHER_COLLECTIVE_LABELS.get(collective["op"], "")
    half = str(collective["op"]).replace("_", "-")
    return f"bucket {bucket}" if half == "all-reduce" else f"bucket {bucket}: {half}"


def build_unfinished_columns(timeline: Timeline, layout: LaneLayout) -> Columns:
    """Return the collectives that never completed, each on its own row of its lane."""
    columns = make_empty_columns("left", "right", "top", "bottom", "category")
    names = ("lane", "row", "start_ns", "end_ns")
    for lane, row, start_ns, end_ns in zip(*(timeline.unfinished[name].tolist() for name in names), strict=True):
        spans = timeline.lanes[lane].spans
        position = int(np.flatnonzero(spans.rows == row)[0])
        top, bottom = compute_rows_px(layout, lane, spans.stack[[position]], spans.stack_heights[[position]])
        columns["left"].append(float(start_ns))
        columns["right"].append(float(end_ns))
        columns["top"].append(float(top[0]))
        columns["bottom"].append(float(bottom[0]))
    columns["category"] = bucket_categories(timeline.unfinished["bucket"].to_numpy())
    return columns


def build_step_line_columns(steps: pd.DataFrame, view: View, width_px: int) -> Columns:
    """Return where steps begin, thinned out until labels are readable.

    100 steps in view of 20 px each leave one of 5 (76 px / 20 px, rounded up to 1, 2 or 5): steps 0, 5, 10, ...
    """
    starts_ns = steps["start_ns"].to_numpy()
    first, last = np.searchsorted(starts_ns, view)
    indices = np.arange(first, last)
    if len(indices) > 1:
        between_px = (
            (starts_ns[indices[-1]] - starts_ns[indices[0]]) / (len(indices) - 1) / (view[1] - view[0]) * width_px
        )
        # Counted from the first step of all, so that the same lines stay while the view is dragged.
        indices = indices[indices % _round_up(math.ceil(_STEP_LINE_PX / between_px)) == 0]
    return {
        "x": starts_ns[indices].astype(np.float64),
        "label": [f"step {number}" for number in steps["step"].to_numpy()[indices]],
    }


def _round_up(number: int) -> int:
    """Return a number rounded up to one of 1, 2, 5, 10, 20 ..."""
    power = 1
    while power * 10 < number:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= number)


def _build_lane_spans(lane: Lane, number: int, layout: LaneLayout, view: View, pixel_ns: float) -> Columns:
    found = lane.spans.in_view(*view)
    top, bottom = compute_rows_px(layout, number, lane.spans.stack[found], lane.spans.stack_heights[found])
    rows = lane.spans.rows[found]
    left = lane.spans.starts_ns[found].astype(np.float64)
    colour, pattern = colors_and_patterns(lane.spans.categories[found])
    return {
        "left": left,
        "right": np.maximum(lane.spans.ends_ns[found], left + pixel_ns),
        "top": top,
        "bottom": bottom,
        "category": colour,
        "pattern": pattern,
        "alpha": np.where(lane.is_wait(rows), 0.45, 1.0).astype(np.float32),
        "lane": np.full(len(found), number, dtype=np.int32),
        "row": rows,
    }


def compute_rows_px(
    layout: LaneLayout, lane: int, stack: npt.NDArray[np.uint16], heights: npt.NDArray[np.uint16]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return top and bottom of the rows of a lane, which leave a pixel of margin at either edge of the lane."""
    top_px, bottom_px = layout.lane_px(lane)
    row_px = (bottom_px - top_px - 2) / heights
    top = top_px + 1 + stack * row_px
    return top.astype(np.float32), (top + row_px).astype(np.float32)
