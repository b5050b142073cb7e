"""Bokeh columns of a view of the timeline, from the lanes of a recording."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dashboards.plots.exposed_columns import ExposedSpans
from dashboards.plots.ideal import IdealCycles
from dashboards.plots.lane_layout import COLLAPSED_PX, RANK_UNITS, LaneLayout, ShownLanes, lane_units
from dashboards.plots.wide_figure import LETTER_PX, MIN_LABELED_PX, Columns, make_empty_columns
from dashboards.recording import Rounds
from dashboards.theme import SHADES
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
from overlapscope.breakdown.spans import Float64Array, Int64Array
from overlapscope.breakdown.text import PHASE_LABELS
from overlapscope.text import format_ns

View = tuple[int, int]
"""Start and end of a view, in nanoseconds from the start of the recording."""

SPAN_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "pattern", "alpha", "lane", "row")
SHADE_COLUMNS: Final = ("image", "x", "y", "dw", "dh")
LABEL_COLUMNS: Final = ("x", "y", "text", "category")

_STEP_LINE_PX: Final = 76


def build_span_columns(shown: ShownLanes, view: View, pixel_ns: float) -> Columns:
    """Return every span in view as a rectangle; concurrent spans share the height of their lane.

    ``pixel_ns`` is the minimum width of a rectangle, so that instants and short spans are visible. Outlines would do
    that too, but double the time that the browser needs to draw.
    """
    parts = [
        _build_lane_spans(shown.timeline.lanes[number], number, shown.layout, view, pixel_ns)
        for number in shown.drawn_lanes
    ]
    return {name: np.concatenate([part[name] for part in parts] or [[]]) for name in SPAN_COLUMNS}


def build_shade_columns(
    shown: ShownLanes, exposed: ExposedSpans, view: View, pixels: int, *, without: View | None
) -> Columns:
    """Return images of the lanes drawn, ``pixels`` wide: color by category, shade by how busy a pixel is.

    Pixels of phases with exposed communication are red instead, shaded by its share. An expanded rank is one image, and
    so are collapsed ones that follow each other. The range ``without`` is left blank, because single spans are drawn
    there.
    """
    edges_ns = pixel_edges(*view, pixels)
    columns = make_empty_columns(*SHADE_COLUMNS)
    width_ns = float(edges_ns[-1] - edges_ns[0])
    for top_px, height_px, picture in _draw_shades(shown, exposed, edges_ns):
        if without is not None:
            picture[:, (edges_ns[1:] > without[0]) & (edges_ns[:-1] < without[1])] = 0
        one = {"image": picture, "x": float(edges_ns[0]), "y": top_px, "dw": width_ns, "dh": height_px}
        for name, value in one.items():
            columns[name].append(value)
    return columns


def _draw_shades(
    shown: ShownLanes, exposed: ExposedSpans, edges_ns: Int64Array
) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Generate top, height and pixels of each image."""
    layout, begun = shown.layout, []
    for position in shown.drawn:
        first = position * len(LANE_NAMES)
        if not layout.is_expanded[position]:
            begun.append(_shade_lane(shown.timeline.lanes[first], exposed, edges_ns))
            if position + 1 not in shown.drawn or layout.is_expanded[position + 1]:
                bottom_px = layout.rank_px(position)[1]
                yield bottom_px - COLLAPSED_PX * len(begun), COLLAPSED_PX * len(begun), np.stack(begun)
                begun = []
            continue
        picture = np.zeros((RANK_UNITS, len(edges_ns) - 1), dtype=np.uint8)
        for index in range(len(LANE_NAMES)):
            from_unit, to_unit = lane_units(index)
            picture[from_unit:to_unit] = _shade_lane(shown.timeline.lanes[first + index], exposed, edges_ns)
        yield layout.rank_px(position)[0], RANK_UNITS * layout.unit_px, picture


def _shade_lane(lane: Lane, exposed: ExposedSpans, edges_ns: Int64Array) -> npt.NDArray[np.uint8]:
    busy_ns, category = lane.spans.pixels(edges_ns)
    color, _ = colors_and_patterns(category)
    share = busy_ns / np.diff(edges_ns)
    if lane.is_instants:
        begun = lane.spans.begun(edges_ns)
        share = begun / max(1, begun.max())
    if lane.name == "phases":
        exposed_ns, _ = exposed.of(lane.rank).pixels(edges_ns)
        is_exposed = exposed_ns > 0
        share = np.where(is_exposed, exposed_ns / np.diff(edges_ns), share)
        color = np.where(is_exposed, np.uint8(CATEGORIES.index("exposed")), color)
        category = np.where(is_exposed, np.uint8(0), category)
    # Rounded up: the shortest span leaves a mark.
    shade = np.ceil(share * (SHADES - 1)).astype(np.uint8)
    return np.where(category == NO_CATEGORY, np.uint8(0), color * np.uint8(SHADES) + shade)


_OTHER_COLLECTIVE_LABELS: Final = {"broadcast": "buffers", "all_reduce": "used parameters"}
"""Label of a collective that is not a bucket's, by operation."""


def build_label_columns(
    timeline: Timeline, spans: Columns, exposed: Columns, view: View, width_px: int, collectives: pd.DataFrame
) -> Columns:
    """Return the name of each phase and collective whose rectangle (of ``spans``) is wide enough to hold it.

    Where exposed communication covers a phase, its name is beside that.
    """
    ns_per_px = (view[1] - view[0]) / max(1, width_px)
    visible_from = np.maximum(spans["left"], view[0])
    visible_to = np.minimum(spans["right"], view[1])
    labels = make_empty_columns(*LABEL_COLUMNS)
    roomy = (visible_to - visible_from > 30 * ns_per_px) & (spans["bottom"] - spans["top"] >= MIN_LABELED_PX)
    covered = {lane: np.flatnonzero(exposed["lane"] == lane) for lane in np.unique(exposed["lane"]).tolist()}
    for at in np.flatnonzero(roomy):
        lane = int(spans["lane"][at])
        text = format_span_label(timeline.lanes[lane], spans["category"][at], spans["row"][at], collectives)
        left, right = float(visible_from[at]), float(visible_to[at])
        if text and lane in covered:
            left, right = _find_free_part(left, right, *(exposed[edge][covered[lane]] for edge in ("left", "right")))
        if text and len(text) * LETTER_PX + 10 < (right - left) / ns_per_px:
            labels["x"].append(left + 5 * ns_per_px)
            labels["y"].append(float(spans["top"][at] + spans["bottom"][at]) / 2)
            labels["text"].append(text)
            labels["category"].append(int(spans["category"][at]))
    return labels


def _find_free_part(left: float, right: float, starts: Float64Array, ends: Float64Array) -> tuple[float, float]:
    """Return the longest part of a range that no interval covers; intervals are in order and do not overlap.

    Example: of 0 to 10, covered from 4 to 5, that is 5 to 10.
    """
    inside = (starts < right) & (ends > left)
    gap_starts = np.concatenate([[left], np.minimum(ends[inside], right)])
    gap_ends = np.concatenate([np.maximum(starts[inside], left), [right]])
    longest = int(np.argmax(gap_ends - gap_starts))
    return float(gap_starts[longest]), float(gap_ends[longest])


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


def build_unfinished_columns(shown: ShownLanes) -> Columns:
    """Return the collectives that never completed, each on its own row of its lane."""
    columns = make_empty_columns("left", "right", "top", "bottom", "category")
    buckets = []
    for number in shown.drawn_lanes:
        lane = shown.timeline.lanes[number]
        if lane.name != "communication":
            continue
        unfinished = shown.timeline.unfinished_of(lane.rank)
        positions = np.flatnonzero(np.isin(lane.spans.rows, unfinished["row"].to_numpy()))
        order = np.argsort(lane.spans.rows[positions])
        positions = positions[order]
        top, bottom = compute_rows_px(
            shown.layout, number, lane.spans.stack[positions], lane.spans.stack_heights[positions]
        )
        unfinished = unfinished.sort_values("row")
        columns["left"] += unfinished["start_ns"].astype(float).tolist()
        columns["right"] += unfinished["end_ns"].astype(float).tolist()
        columns["top"] += top.tolist()
        columns["bottom"] += bottom.tolist()
        buckets += unfinished["bucket"].tolist()
    columns["category"] = bucket_categories(np.array(buckets, dtype=np.int64))
    return columns


STEP_LINE_COLUMNS: Final = ("x", "top", "bottom")


def thin_out_steps(steps: pd.DataFrame, view: View, width_px: int) -> Int64Array:
    """Return the steps, by row of the table, that have a line and a label: as many as leave labels readable.

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
    return indices


def build_step_label_columns(steps: pd.DataFrame, view: View, width_px: int) -> Columns:
    """Return the beginning of steps on the time axis, with labels where they fit before the next and the edge."""
    view_ns = view[1] - view[0]
    wide = (view[0] - view_ns, view[1] + view_ns)
    rows = thin_out_steps(steps, wide, 3 * width_px)
    starts_ns, labels = steps["start_ns"].to_numpy()[rows], [f"step {number}" for number in steps["step"][rows]]
    ends_ns = starts_ns + np.array([len(label) * LETTER_PX + 6 for label in labels]) * view_ns / max(1, width_px)
    is_cut = (starts_ns < view[1]) & (ends_ns > view[1])
    is_cut[:-1] |= ends_ns[:-1] > starts_ns[1:]  # steps of very different lengths, as before a hang
    return {
        "x": starts_ns.astype(np.float64),
        "label": ["" if cut else label for label, cut in zip(labels, is_cut.tolist(), strict=True)],
    }


def build_step_line_columns(shown: ShownLanes, steps: Int64Array, view: View) -> Columns:
    """Return where each rank drawn begins some steps, as lines from top to bottom of the rank."""
    columns = make_empty_columns(*STEP_LINE_COLUMNS)
    for position in shown.drawn:
        starts = shown.timeline.step_starts(shown.timeline.ranks[position])
        starts_ns = starts["start_ns"].to_numpy()
        first, after = np.searchsorted(starts_ns, view)
        found = starts_ns[first:after][np.isin(starts["step"].to_numpy()[first:after], steps)]
        top_px, bottom_px = shown.layout.rank_px(position)
        columns["x"] += found.astype(float).tolist()
        columns["top"] += [top_px] * len(found)
        columns["bottom"] += [bottom_px] * len(found)
    return columns


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


# Bokeh columns of the ideal over the timeline, from ideal cycles.

OUTLINE_COLUMNS: Final = ("left", "right", "top", "bottom")
IDEAL_END_COLUMNS: Final = ("x", "label")

_MIN_OUTLINE_PX: Final = 4
_SENTENCE_PX: Final = 240
_NUMBER_PX: Final = 130


def build_outline_columns(ideal: IdealCycles, shown: ShownLanes, ns_per_px: float) -> Columns:
    """Return the ideal's phases and collectives as rectangles, in the lanes of every rank that it applies to."""
    segments = {"phases": ideal.phases, "communication": ideal.collectives}
    ranks = frozenset(ideal.ranks.tolist())
    lanes = [
        _outline_lane(segments[lane.name], shown.layout.lane_px(number), shown.timeline.begin_ns, ns_per_px)
        for number, lane in ((number, shown.timeline.lanes[number]) for number in shown.drawn_lanes)
        if lane.name in segments and lane.rank in ranks
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


def build_path_columns(path: CriticalPath, shown: ShownLanes, view: View) -> Columns:
    """Return the points of a line along the phases of the rank that all wait for, and along exposed transfers.

    A transfer is drawn on the rank where the path continues after it. Where the path is on a rank that is not shown,
    there is a gap.
    """
    timeline, layout = shown.timeline, shown.layout
    from_ns, until_ns = path.from_ns - timeline.begin_ns, path.until_ns - timeline.begin_ns
    first, after = np.searchsorted(until_ns, view[0]), np.searchsorted(from_ns, view[1])
    if first >= after:
        return make_empty_columns(*PATH_COLUMNS)
    first_lanes = {rank: index * len(LANE_NAMES) for index, rank in enumerate(timeline.ranks)}
    heights = np.full(after - first, np.nan)
    next_rank = next((who for who in path.who[after:].tolist() if who >= 0), None)
    for index, who in reversed(list(enumerate(path.who[first:after].tolist()))):
        next_rank = who if who >= 0 else next_rank
        if next_rank in first_lanes:
            top, bottom = layout.lane_px(first_lanes[next_rank] + (_COMMUNICATION if who < 0 else _PHASES))
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


def build_round_columns(rounds: Rounds, shown: ShownLanes, view: View, ns_per_px: float) -> Columns:
    """Return every round in view that is wide enough to be distinguished from its neighbors.

    Concurrent reductions, such as those of two trees, are above each other.
    """
    timeline = shown.timeline
    parts = [
        _build_lane_columns(rounds, timeline.lanes[number], number, timeline.begin_ns, shown.layout, view, ns_per_px)
        for number in shown.drawn_lanes
        if number % len(LANE_NAMES) == _COMMUNICATION
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
