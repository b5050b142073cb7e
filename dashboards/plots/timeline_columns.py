"""Bokeh columns of a view of the timeline, from the lanes of a recording."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dashboards.plots.ideal import IdealCycles
from dashboards.plots.wide_figure import LETTER_PX, MIN_LABELED_PX, Columns, make_empty_columns
from dashboards.recording import Rounds
from dashboards.theme import SHADES
from overlapscope.breakdown.breakdown import Breakdown
from overlapscope.breakdown.critical_path import CriticalPath
from overlapscope.breakdown.lanes import (
    CATEGORIES,
    LANE_NAMES,
    NO_CATEGORY,
    Lane,
    Timeline,
    bucket_categories,
    colors_and_patterns,
    pixel_edges,
)
from overlapscope.breakdown.text import PHASE_LABELS
from overlapscope.text import format_ns

# Vertical layout of the lanes of the timeline, in pixels from the top.

_LANE_UNITS: Final = {"phases": 2, "gradients": 1, "buckets": 2, "communication": 3}
_GAP_UNITS: Final = 1
_WINDOW_PX: Final = 620
_ALL_LABELED_UNIT_PX: Final = 8
_RANK_UNITS: Final = sum(_LANE_UNITS.values()) + _GAP_UNITS


@dataclass(frozen=True, kw_only=True)
class LaneLayout:
    """Lanes of equal units of height, rank below rank, a unit of space between ranks.

    Whole units let one image with a row of pixels per unit cover all lanes.
    """

    ranks: int
    unit_px: int

    @property
    def units(self) -> int:
        """Return the height of all lanes together, in units."""
        return self.ranks * _RANK_UNITS

    @property
    def height_px(self) -> int:
        """Return the height of all lanes together."""
        return self.units * self.unit_px

    @property
    def rank_height_px(self) -> int:
        """Return the height of the lanes of one rank and of the space below them."""
        return _RANK_UNITS * self.unit_px

    @property
    def labeled_lanes(self) -> tuple[str, ...]:
        """Return the lanes of a rank whose names are readable beside each other."""
        return LANE_NAMES if self.unit_px >= _ALL_LABELED_UNIT_PX else ("phases", "communication")

    def lane_units(self, lane: int) -> tuple[int, int]:
        """Return the first unit of a lane and the unit after its last.

        A rank has 9 units: phases 2, gradients 1, buckets 2, communication 3, space 1. Lane 5, the gradients of the
        second rank, begins at 9 + 2: ``lane_units(5) == (11, 12)``.
        """
        rank, index = divmod(lane, len(LANE_NAMES))
        heights = [_LANE_UNITS[name] for name in LANE_NAMES]
        top = rank * _RANK_UNITS + sum(heights[:index])
        return top, top + heights[index]

    def lane_px(self, lane: int) -> tuple[int, int]:
        """Return top and bottom of a lane."""
        top, bottom = self.lane_units(lane)
        return top * self.unit_px, bottom * self.unit_px


def layout_lanes(ranks: int) -> LaneLayout:
    """Return a layout that fits a window if possible: few ranks are not stretched, many stay distinguishable."""
    fitting_px = _WINDOW_PX // (max(1, ranks) * _RANK_UNITS)
    return LaneLayout(ranks=ranks, unit_px=min(max(fitting_px, 4), 18))


View = tuple[int, int]
"""Start and end of a view, in nanoseconds from the start of the recording."""

SPAN_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "pattern", "alpha", "lane", "row")
SHADE_COLUMNS: Final = ("image", "x", "y", "dw", "dh")
LABEL_COLUMNS: Final = ("x", "y", "text", "category")

_STEP_LINE_PX: Final = 76


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
        color, _ = colors_and_patterns(category)
        share = busy_ns / np.diff(edges_ns)
        if lane.is_instants:
            begun = lane.spans.begun(edges_ns)
            share = begun / max(1, begun.max())
        # Rounded up: the shortest span leaves a mark.
        shade = np.ceil(share * (SHADES - 1)).astype(np.uint8)
        first, after = layout.lane_units(number)
        picture[first:after] = np.where(category == NO_CATEGORY, 0, color * np.uint8(SHADES) + shade)
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
    roomy = (visible_px > 30) & (spans["bottom"] - spans["top"] >= MIN_LABELED_PX)
    for at in np.flatnonzero(roomy):
        text = format_span_label(
            timeline.lanes[spans["lane"][at]], spans["category"][at], spans["row"][at], collectives
        )
        if text and len(text) * LETTER_PX + 10 < visible_px[at]:
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
    color, pattern = colors_and_patterns(lane.spans.categories[found])
    return {
        "left": left,
        "right": np.maximum(lane.spans.ends_ns[found], left + pixel_ns),
        "top": top,
        "bottom": bottom,
        "category": color,
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


# Bokeh columns of exposed communication on the timeline: brackets below the lanes of each rank.

EXPOSED_COLUMNS: Final = ("x", "y")

_MAX_BRACKET_PX: Final = 6


def build_exposed_columns(
    breakdown: Breakdown, timeline: Timeline, layout: LaneLayout, view: View, most: int
) -> Columns:
    """Return the points of a line with gaps, which is a bracket below each span of exposed communication in view.

    Args:
        breakdown: step-time breakdown of the recording.
        timeline: lanes of the ranks shown.
        layout: layout of the lanes.
        view: range of time to draw.
        most: maximum number of spans; of more none is drawn, because they could not be distinguished.
    """
    found = []
    for index, rank in enumerate(timeline.ranks):
        spans_ns = breakdown.exposed_spans_ns(rank) - timeline.begin_ns
        first, after = np.searchsorted(spans_ns[1], view[0]), np.searchsorted(spans_ns[0], view[1])
        found.append((index, spans_ns[:, first:after].astype(np.float64)))
    if sum(spans_ns.shape[1] for _, spans_ns in found) > most:
        return make_empty_columns(*EXPOSED_COLUMNS)
    x, y = [], []
    for index, (starts_ns, ends_ns) in found:
        _, top = layout.lane_px(index * len(LANE_NAMES) + LANE_NAMES.index("communication"))
        bottom = top + min(layout.unit_px - 1, _MAX_BRACKET_PX)
        x.append(np.column_stack([starts_ns, starts_ns, ends_ns, ends_ns, np.full(len(starts_ns), np.nan)]).ravel())
        y.append(np.tile([top + 1.0, bottom, bottom, top + 1.0, np.nan], len(starts_ns)))
    return {"x": np.concatenate(x), "y": np.concatenate(y)}


# Bokeh columns of the ideal over the timeline, from ideal cycles.

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


# Bokeh columns of the critical path: one line through the lanes, from rank to rank.

PATH_COLUMNS: Final = ("x", "y")

_PHASES, _COMMUNICATION = LANE_NAMES.index("phases"), LANE_NAMES.index("communication")
_INSIDE_PX: Final = 3


def build_path_columns(path: CriticalPath, timeline: Timeline, layout: LaneLayout, view: View) -> Columns:
    """Return the points of a line along the phases of the rank that all wait for, and along exposed transfers.

    A transfer is drawn on the rank where the path continues after it. Where the path is on a rank that is not shown,
    there is a gap.
    """
    from_ns, until_ns = path.from_ns - timeline.begin_ns, path.until_ns - timeline.begin_ns
    first, after = np.searchsorted(until_ns, view[0]), np.searchsorted(from_ns, view[1])
    if first >= after:
        return make_empty_columns(*PATH_COLUMNS)
    shown = {rank: index * len(LANE_NAMES) for index, rank in enumerate(timeline.ranks)}
    heights = np.full(after - first, np.nan)
    next_rank = next((who for who in path.who[after:].tolist() if who >= 0), None)
    for index, who in reversed(list(enumerate(path.who[first:after].tolist()))):
        next_rank = who if who >= 0 else next_rank
        if next_rank in shown:
            top, bottom = layout.lane_px(shown[next_rank] + (_COMMUNICATION if who < 0 else _PHASES))
            heights[index] = top + _INSIDE_PX if who < 0 else bottom - _INSIDE_PX
    return {
        "x": np.column_stack([from_ns[first:after], until_ns[first:after]]).ravel().astype(np.float64),
        "y": np.repeat(heights, 2),
    }


# Bokeh columns of the rounds of all-reduces: strips along their lower edge.

ROUND_COLUMNS: Final = ("left", "right", "top", "bottom", "alpha", "lane", "row", "segment")

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
        "segment": found.index.to_numpy(dtype=np.int32),
    }


def _index_phases(found: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the index of each round's phase within its reduction, from 0."""
    of_sum = found.groupby(["row", "lane"])["phase"]
    return of_sum.transform(lambda phases: pd.factorize(phases)[0]).to_numpy(dtype=np.int64)
