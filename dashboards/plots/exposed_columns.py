"""Bokeh columns of exposed communication on the timeline: red over the phases of each rank, with its duration."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import numpy.typing as npt

from dashboards.plots.lane_layout import ShownLanes
from dashboards.plots.wide_figure import LETTER_PX, Columns, make_empty_columns
from overlapscope.breakdown.breakdown import Breakdown
from overlapscope.breakdown.lanes import CATEGORIES, LANE_NAMES, Lane, SpanIndex, index_spans
from overlapscope.text import format_ns

EXPOSED_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "lane")

_CATEGORY: Final = CATEGORIES.index("exposed")
_APART_PX: Final = 4
"""Width of a gap from which on spans have durations of their own."""


class ExposedSpans:
    """Exposed communication of each rank, searchable, on the timeline's clock.

    Args:
        breakdown: step-time breakdown of the recording.
        begin_ns: time 0 of the timeline.
    """

    def __init__(self, breakdown: Breakdown, begin_ns: int) -> None:
        self._breakdown, self._begin_ns = breakdown, begin_ns
        self._cached: dict[int, SpanIndex] = {}

    def of(self, rank: int) -> SpanIndex:
        """Return the spans of a rank."""
        if rank not in self._cached:
            starts_ns, ends_ns = self._breakdown.exposed_spans_ns(rank) - self._begin_ns
            categories = np.full(len(starts_ns), _CATEGORY, dtype=np.uint8)
            self._cached[rank] = index_spans(starts_ns, ends_ns, categories, np.arange(len(starts_ns)))
        return self._cached[rank]

    def measure(self, lane: Lane, row: int) -> int:
        """Return how long communication is exposed during a phase, in a row of its lane."""
        index = int(np.flatnonzero(lane.spans.rows == row)[0])
        edges_ns = np.array([lane.spans.starts_ns[index], lane.spans.ends_ns[index]])
        return int(self.of(lane.rank).pixels(edges_ns)[0][0])


def build_exposed_columns(exposed: ExposedSpans, shown: ShownLanes, view: tuple[int, int]) -> Columns:
    """Return a rectangle, as high as the lane of phases, for each span of exposed communication in view."""
    columns = make_empty_columns(*EXPOSED_COLUMNS)
    for position in shown.drawn:
        number = position * len(LANE_NAMES)
        spans = exposed.of(shown.timeline.ranks[position])
        found = spans.in_view(*view)
        top, bottom = shown.layout.lane_px(number)
        columns["left"].append(spans.starts_ns[found].astype(np.float64))
        columns["right"].append(spans.ends_ns[found].astype(np.float64))
        for name, value in (("top", top + 1), ("bottom", bottom - 1), ("category", _CATEGORY), ("lane", number)):
            columns[name].append(np.full(len(found), value, dtype=np.int32))
    return {name: np.concatenate(parts or [np.zeros(0)]) for name, parts in columns.items()}


def build_duration_columns(columns: Columns, view: tuple[int, int], width_px: int) -> Columns:
    """Return how long communication is exposed, where there is room: x, y, text and category, as of other labels.

    Spans closer than some pixels have one label with their sum: 2 ms, a gap of a pixel and 3 ms are "exposed 5.00 ms".

    Args:
        columns: rectangles from ``build_exposed_columns``.
        view: range in view.
        width_px: its width on the screen.
    """
    ns_per_px = (view[1] - view[0]) / max(1, width_px)
    left, right = np.maximum(columns["left"], view[0]), np.minimum(columns["right"], view[1])
    labels = make_empty_columns("x", "y", "text", "category")
    for first, after in _group(columns, _APART_PX * ns_per_px):
        room_px = (right[after - 1] - left[first]) / ns_per_px - 10
        duration = format_ns(int((columns["right"][first:after] - columns["left"][first:after]).sum()))
        text = next((text for text in (f"exposed {duration}", duration) if len(text) * LETTER_PX < room_px), "")
        if text:
            labels["x"].append(float(left[first]) + 5 * ns_per_px)
            labels["y"].append(float(columns["top"][first] + columns["bottom"][first]) / 2)
            labels["text"].append(text)
            labels["category"].append(_CATEGORY)
    return labels


def _group(columns: Columns, apart_ns: float) -> list[tuple[int, int]]:
    """Return the first span of each group and the one after its last."""
    if not len(columns["left"]):
        return []
    lanes: npt.NDArray[np.int32] = columns["lane"]
    is_apart = (columns["left"][1:] - columns["right"][:-1] > apart_ns) | (lanes[1:] != lanes[:-1])
    bounds = [0, *(np.flatnonzero(is_apart) + 1).tolist(), len(lanes)]
    return list(itertools.pairwise(bounds))
