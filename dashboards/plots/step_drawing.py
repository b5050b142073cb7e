"""Drawing of a step that needs no server: every span with its name and details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.plots.span_details import SpanDetails, get_span_details
from dashboards.plots.timeline import MAX_SPANS, compute_step_view
from dashboards.plots.timeline_columns import (
    LaneLayout,
    View,
    build_span_columns,
    build_unfinished_columns,
    format_span_label,
    layout_lanes,
)
from dashboards.plots.tooltip import build_tooltip
from overlapscope.breakdown.lanes import CATEGORIES, LANE_NAMES, LaneCache, Timeline
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
    """One step of some ranks."""

    number: int
    ranks: tuple[int, ...]
    all_ranks: int
    layout: LaneLayout
    data: dict[str, Any]
    """Input of the page's script; times are nanoseconds from the start of the step."""
    rows: tuple[SpanRow, ...]
    """Phases and collectives of the step."""

    @property
    def lane_labels(self) -> list[tuple[str, tuple[int, int]]]:
        """Return the names of a rank's lanes, each with its top and bottom in pixels."""
        return [(name, self.layout.lane_px(LANE_NAMES.index(name))) for name in self.layout.labeled_lanes]


def draw_step(trace: Trace, lanes: LaneCache, number: int, ranks: Sequence[int]) -> StepDrawing:
    """Draw a recorded step.

    Args:
        trace: the recording.
        lanes: lanes of the same recording.
        number: number of the step.
        ranks: from top to bottom; fewer are drawn if these have more spans than can be drawn without a server.
    """
    timeline, view = _select_drawable_ranks(lanes, number, ranks)
    layout = layout_lanes(len(timeline.ranks))
    spans = build_span_columns(timeline, layout, view, 0)
    start_ns = int(timeline.steps.loc[timeline.steps["step"] == number, "start_ns"].iloc[0])
    details = [
        get_span_details(trace, timeline.begin_ns, timeline.lanes[lane], int(row))
        for lane, row in zip(spans["lane"], spans["row"], strict=True)
    ]
    labels = [
        format_span_label(timeline.lanes[lane], category, row, trace.collectives)
        for lane, category, row in zip(spans["lane"], spans["category"], spans["row"], strict=True)
    ]
    unfinished = build_unfinished_columns(timeline, layout)
    return StepDrawing(
        number=number,
        ranks=timeline.ranks,
        all_ranks=len(trace.ranks),
        layout=layout,
        data={
            "view": [view[0] - start_ns, view[1] - start_ns],
            "height": layout.height_px,
            "rank_height": layout.rank_height_px,
            "categories": [name.replace("_", "-") for name in CATEGORIES],
            "left": [int(left) - start_ns for left in spans["left"]],
            "right": [int(right) - start_ns for right in spans["right"]],
            "top": [round(float(top), 1) for top in spans["top"]],
            "bottom": [round(float(bottom), 1) for bottom in spans["bottom"]],
            "category": spans["category"].tolist(),
            "pattern": spans["pattern"].tolist(),
            "alpha": [round(float(alpha), 2) for alpha in spans["alpha"]],
            "label": labels,
            "tip": [build_tooltip(each) for each in details],
            "unfinished": [
                [left - start_ns, right - start_ns, round(top, 1), round(bottom, 1)]
                for left, right, top, bottom in zip(
                    *(unfinished[name] for name in ("left", "right", "top", "bottom")), strict=True
                )
                if right > view[0] and left < view[1]
            ],
        },
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
    for pair in found.steps:
        ranks = [rank for rank in pair.ranks if rank in drawable][:_MAX_PAIR_RANKS]
        yield tuple(
            draw_step(trace, lanes[id(trace)], number, sorted(ranks))
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


def _build_span_row(span: SpanDetails) -> SpanRow:
    return SpanRow(
        rank=span.rank,
        what=build_tooltip(span)[0],
        start=format_timestamp_ns(span.start_ns),
        end="never seen" if span.end_ns is None else format_timestamp_ns(span.end_ns),
        duration=format_ns(span.duration_ns),
    )
