"""Drawing of steps that needs no server: every span with its name and details, on one time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from bokeh.models import ColumnDataSource, CustomJS, Range1d

from dashboards.plots.exposed_columns import ExposedSpans, build_exposed_columns
from dashboards.plots.lane_layout import THINNEST_UNIT_PX, LaneLayout, layout_lanes, show_lanes
from dashboards.plots.span_details import SpanDetails, get_span_details
from dashboards.plots.timeline import MAX_SPANS, MIN_VIEW_NS, compute_step_view, draw_unfinished
from dashboards.plots.timeline_columns import (
    LABEL_COLUMNS,
    View,
    build_span_columns,
    build_unfinished_columns,
    format_span_label,
)
from dashboards.plots.tooltip import build_tooltip
from dashboards.plots.wide_figure import (
    TIME_AXIS_PX,
    BucketHatches,
    Columns,
    draw_span_text,
    draw_spans,
    draw_time_axis,
    make_empty_columns,
    make_wide_figure,
)
from dashboards.theme import paint
from overlapscope.breakdown.breakdown import Breakdown, compute_breakdown
from overlapscope.breakdown.lanes import LANE_NAMES, LaneCache, Timeline
from overlapscope.breakdown.text import PHASE_LABELS
from overlapscope.compare.comparison import Comparison
from overlapscope.text import format_ns, format_timestamp_ns
from overlapscope.trace.recording import Trace

_TABLE_LANES: Final = ("phases", "communication")
_MAX_PAIR_RANKS: Final = 2
"""Maximum number of ranks of each side of a pair, so that both are visible at once."""


@dataclass(frozen=True, kw_only=True)
class SpanRow:
    """A span in the table."""

    rank: int
    what: str
    start: str
    end: str
    duration: str


@dataclass(frozen=True, eq=False, kw_only=True)
class StepDrawing:
    """One step of some ranks; times are nanoseconds from its start."""

    number: int
    ranks: tuple[int, ...]
    all_ranks: int
    layout: LaneLayout
    view: View
    spans: Columns
    """Spans of the step and its neighbors in view: ``SPAN_COLUMNS``, ``end``, ``text``, and title, labels and values of
    the tooltip."""
    unfinished: Columns
    rows: tuple[SpanRow, ...]
    """Phases and collectives of the step."""

    @property
    def lane_labels(self) -> list[tuple[str, tuple[int, int]]]:
        """Return the names of a rank's lanes, each with its top and bottom in pixels."""
        return [(name, self.layout.lane_px(LANE_NAMES.index(name))) for name in self.layout.labeled_lanes]

    @property
    def axis_px(self) -> int:
        """Return the height of the time axis above the lanes."""
        return TIME_AXIS_PX


def draw_step(trace: Trace, lanes: LaneCache, breakdown: Breakdown, number: int, ranks: Sequence[int]) -> StepDrawing:
    """Draw a recorded step.

    Args:
        trace: the recording.
        lanes: lanes of the same recording.
        breakdown: step-time breakdown of the same recording.
        number: number of the step.
        ranks: from top to bottom; fewer are drawn if these have more spans than can be drawn without a server.
    """
    timeline, view = _select_drawable_ranks(lanes, number, ranks)
    shown = show_lanes(timeline, layout_lanes(len(timeline.ranks), range(len(timeline.ranks)), THINNEST_UNIT_PX))
    shown.drawn = range(len(timeline.ranks))
    spans = build_span_columns(shown, view, 0)
    start_ns = int(timeline.steps.loc[timeline.steps["step"] == number, "start_ns"].iloc[0])
    details = [
        get_span_details(trace, timeline.begin_ns, timeline.lanes[lane], int(row))
        for lane, row in zip(spans["lane"], spans["row"], strict=True)
    ]
    return StepDrawing(
        number=number,
        ranks=timeline.ranks,
        all_ranks=len(trace.ranks),
        layout=shown.layout,
        view=(view[0] - start_ns, view[1] - start_ns),
        spans=_add_exposed(
            _shift(spans, start_ns) | _build_texts(timeline, trace, spans, details),
            _shift(build_exposed_columns(ExposedSpans(breakdown, timeline.begin_ns), shown, view), start_ns),
        ),
        unfinished=_shift(build_unfinished_columns(shown), start_ns),
        rows=tuple(
            _build_span_row(each)
            for each, lane in zip(details, spans["lane"], strict=True)
            if each.step == number and timeline.lanes[lane].name in _TABLE_LANES
        ),
    )


def draw_pairs(found: Comparison) -> Iterator[tuple[StepDrawing, ...]]:
    """Draw the steps that differ most, one after the other, of both sides, on the ranks with the largest differences.

    A pair is empty if none of its ranks has a clock that is aligned with others on both sides.
    """
    traces = (found.base.trace, found.new.trace)
    drawable = set(traces[0].aligned_ranks) & set(traces[1].aligned_ranks)
    lanes = {id(trace): LaneCache(trace) for trace in traces}
    breakdowns = {id(trace): compute_breakdown(trace) for trace in traces} if found.steps else {}
    for pair in found.steps:
        ranks = [rank for rank in pair.ranks if rank in drawable][:_MAX_PAIR_RANKS]
        yield tuple(
            draw_step(trace, lanes[id(trace)], breakdowns[id(trace)], number, sorted(ranks))
            for trace, number in zip(traces, (pair.base_step, pair.new_step), strict=True)
            if ranks
        )


def _select_drawable_ranks(lanes: LaneCache, number: int, ranks: Sequence[int]) -> tuple[Timeline, View]:
    """Return the step on as many of the first ranks as can be drawn without a server."""
    while True:
        timeline = lanes.timeline(ranks)
        view = compute_step_view(timeline, number)
        assert view is not None, "the step was recorded"
        if len(ranks) == 1 or sum(lane.spans.count(*view) for lane in timeline.lanes) <= MAX_SPANS:
            return timeline, view
        ranks = ranks[: len(ranks) // 2]


def _shift(columns: Columns, start_ns: int) -> Columns:
    """Return columns whose times count from ``start_ns``."""
    return columns | {name: [ns - start_ns for ns in columns[name]] for name in ("left", "right")}


def _add_exposed(spans: Columns, exposed: Columns) -> Columns:
    """Return spans and, above them, exposed communication with its duration; waits that it covers have no name."""
    sizes = [format_ns(int(right - left)) for left, right in zip(exposed["left"], exposed["right"], strict=True)]
    count = len(sizes)
    more = {
        **{name: exposed[name] for name in ("left", "right", "top", "bottom", "category", "lane")},
        "pattern": np.zeros(count, dtype=np.uint8),
        "alpha": np.ones(count, dtype=np.float32),
        "row": np.full(count, -1, dtype=np.int32),
        "text": [f"exposed {size}" for size in sizes],
        "title": ["Exposed communication"] * count,
        "labels": [["duration"]] * count,
        "values": [[size] for size in sizes],
    }
    texts = ["" if text == PHASE_LABELS["finalize"] else text for text in spans["text"]]
    joined = spans | {"text": texts}
    return {
        name: [*joined[name], *more[name]]
        if isinstance(joined[name], list)
        else np.concatenate([joined[name], more[name]]).astype(joined[name].dtype)
        for name in joined
    }


def _build_texts(timeline: Timeline, trace: Trace, spans: Columns, details: Sequence[SpanDetails]) -> Columns:
    """Return the name of each span, empty for spans without one, and its tooltip."""
    tooltips = [build_tooltip(each) for each in details]
    return {
        "text": [
            format_span_label(timeline.lanes[lane], category, row, trace.collectives)
            for lane, category, row in zip(spans["lane"], spans["category"], spans["row"], strict=True)
        ],
        "title": [title for title, _ in tooltips],
        "labels": [[label for label, _ in rows] for _, rows in tooltips],
        "values": [[value for _, value in rows] for _, rows in tooltips],
    }


def _build_span_row(span: SpanDetails) -> SpanRow:
    return SpanRow(
        rank=span.rank,
        what=build_tooltip(span)[0],
        start=format_timestamp_ns(span.start_ns),
        end="never seen" if span.end_ns is None else format_timestamp_ns(span.end_ns),
        duration=format_ns(span.duration_ns),
    )


class StepPlots:
    """Figures of steps, of lanes (``lanes_0`` ...) and time axes (``axis_0`` ...), zoomed and panned together.

    Args:
        drawings: the steps.
    """

    def __init__(self, drawings: Sequence[StepDrawing]) -> None:
        """Draw the steps."""
        starts_ns, ends_ns = zip(*(drawing.view for drawing in drawings), strict=True)
        whole = min(starts_ns), max(ends_ns)
        self.time_range = Range1d(start=whole[0], end=whole[1], bounds=whole, min_interval=MIN_VIEW_NS)
        self.roots: list[Any] = []
        self._steps = [self._draw(drawing, index) for index, drawing in enumerate(drawings)]

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: connects mouse and keys, and fits texts."""
        return CustomJS(
            args={"range": self.time_range, "steps": self._steps},
            code="window.overlapscope.startSteps(range, steps)",
        )

    def _draw(self, drawing: StepDrawing, index: int) -> dict[str, Any]:
        """Draw a step; return the models that the browser changes."""
        layout = drawing.layout
        lanes = make_wide_figure(
            self.time_range, Range1d(start=layout.height_px, end=0), layout.height_px, f"lanes_{index}"
        )
        lanes.xaxis.visible = False
        axis = draw_time_axis(self.time_range, f"axis_{index}")
        lanes.xgrid.visible = True
        lanes.xgrid.ticker = axis.xaxis[0].ticker
        paint(lanes.xgrid[0], grid_line_color="grid")
        edges = layout.tops_px[1:-1].tolist()
        paint(lanes.hspan(y=edges, line_width=1).glyph, line_color="line")
        spans, hatches = ColumnDataSource(data=drawing.spans | {"end": drawing.spans["right"]}), BucketHatches()
        draw_spans(lanes, spans, fill_alpha="alpha")
        hatches.update(drawing.spans)
        hatches.draw(lanes)
        draw_unfinished(lanes, ColumnDataSource(data=drawing.unfinished))
        labels = ColumnDataSource(data=make_empty_columns(*LABEL_COLUMNS))
        draw_span_text(lanes, labels)
        self.roots += [axis, lanes]
        zoom = [figure.toolbar.active_scroll for figure in (axis, lanes)]
        for tool in zoom:
            tool.modifiers = {"ctrl": True}  # otherwise the wheel scrolls the page
        return {"axis": axis, "lanes": lanes, "spans": spans, "labels": labels, "zoom": zoom}
