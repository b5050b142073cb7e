"""Timeline plot: every lane of every rank on one time axis, as single spans or as shades of busy time.

The browser requests, the server responds. A script in the page (``assets/timeline.js``) writes the range it shows into
``view`` whenever that changes, one request at a time; ``update`` fills the sources with that range, and as much again
on either side, so that a drag shows something before the next response. Bokeh's own ``RangesUpdate`` event
comes only when a drag is over, which is too late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import Span

from dashboards.plots.browser_rpc import TOOLTIP_COLUMNS, BrowserRpc, RequestColumns, build_tooltip_columns
from dashboards.plots.exposed_columns import (
    EXPOSED_COLUMNS,
    ExposedSpans,
    build_duration_columns,
    build_exposed_columns,
)
from dashboards.plots.ideal import IdealCycles, compute_ideal
from dashboards.plots.lane_ends import LANE_END_COLUMNS, build_lane_end_columns
from dashboards.plots.lane_layout import WINDOW_PX, LaneLayout, ShownLanes, show_lanes
from dashboards.plots.span_details import get_span_details
from dashboards.plots.timeline_area import TimelineArea
from dashboards.plots.timeline_columns import (
    IDEAL_END_COLUMNS,
    LABEL_COLUMNS,
    OUTLINE_COLUMNS,
    PATH_COLUMNS,
    ROUND_COLUMNS,
    SHADE_COLUMNS,
    SPAN_COLUMNS,
    STEP_LINE_COLUMNS,
    View,
    build_ideal_end_columns,
    build_label_columns,
    build_outline_columns,
    build_path_columns,
    build_round_columns,
    build_shade_columns,
    build_span_columns,
    build_step_label_columns,
    build_step_line_columns,
    build_unfinished_columns,
    thin_out_steps,
)
from dashboards.plots.timeline_selection import TimelineSelection
from dashboards.plots.tooltip import build_round_rows, build_tooltip
from dashboards.plots.wide_figure import (
    EDGES,
    SMALL_TEXT,
    BucketHatches,
    draw_span_text,
    draw_spans,
    draw_time_axis,
    make_empty_columns,
    make_wide_figure,
    update_source,
)
from dashboards.recording import Snapshot
from dashboards.theme import SHADES, paint
from overlapscope.breakdown.breakdown import BLOCKS, Breakdown
from overlapscope.breakdown.lanes import CATEGORIES, Timeline
from overlapscope.text import format_ns

# Bokeh figures of the timeline: lanes, and above them their time axis, which stays in place when lanes scroll.

AXIS_HEIGHT_PX: Final = 44


def draw_lanes(
    time_range: Range1d,
    rows: Range1d,
    *,
    spans: ColumnDataSource,
    hatches: BucketHatches,
    segments: ColumnDataSource,
    shades: ColumnDataSource,
    gaps: ColumnDataSource,
    labels: ColumnDataSource,
    unfinished: ColumnDataSource,
    step_lines: ColumnDataSource,
    outlines: ColumnDataSource,
    ideal_ends: ColumnDataSource,
    exposed: ColumnDataSource,
    path: ColumnDataSource,
) -> Any:
    """Draw the lanes in view; y is pixels from the top of all ranks."""
    plot = make_wide_figure(time_range, rows, WINDOW_PX, "lanes", tools=[_make_crosshair()])
    plot.sizing_mode = "stretch_both"
    plot.xaxis.visible = False

    shade_mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) * SHADES - 0.5)
    paint(shade_mapper, palette="shade_palette")
    plot.image(image="image", x="x", y="y", dw="dw", dh="dh", source=shades, color_mapper=shade_mapper, level="glyph")
    paint(plot.hspan(y="y", source=gaps, line_width=2, level="glyph").glyph, line_color="surface")

    draw_spans(plot, spans, fill_alpha="alpha")
    hatches.draw(plot)
    strips = plot.quad(**EDGES, source=segments, fill_alpha="alpha", line_width=1)
    paint(strips.glyph, fill_color="surface", line_color="surface")
    draw_unfinished(plot, unfinished)
    draw_spans(plot, exposed)
    begins = plot.segment(
        x0="x", x1="x", y0="top", y1="bottom", source=step_lines, line_width=1, level="overlay", line_dash="2 3"
    )
    paint(begins.glyph, line_color="faint")
    draw_span_text(plot, labels)
    ideal = plot.quad(**EDGES, source=outlines, fill_color=None, line_width=1.5)
    paint(ideal.glyph, line_color="accent")
    for role, line_width in (("surface", 6), ("ink", 2.5)):  # a line on a halo is visible on any color
        paint(plot.line(x="x", y="y", source=path, line_width=line_width, level="overlay").glyph, line_color=role)
    ends = plot.vspan(x="x", source=ideal_ends, line_width=1.5, level="overlay")
    paint(ends.glyph, line_color="accent")
    return plot


def _draw_ends(plot: Any, source: ColumnDataSource) -> None:
    text = plot.text(x="x", y="y", text="text", x_offset="offset", text_align="align", source=source, level="overlay")
    text.glyph.update(**SMALL_TEXT, text_font_style="bold", padding=3)
    paint(text.glyph, text_color="surface", background_fill_color="ink")
    mark = plot.scatter(x="x", y="y", source=source, marker="x", size=9, line_width=2.5, level="overlay")
    paint(mark.glyph, line_color="ink")


def draw_unfinished(plot: Any, source: ColumnDataSource) -> None:
    """Draw collectives that never completed."""
    hatched = plot.quad(
        **EDGES,
        source=source,
        fill_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_scale=8,
        hatch_weight=1.5,
        line_width=1.5,
        line_dash="dashed",
    )
    paint(hatched.glyph, hatch_color="ink", line_color="ink")


def draw_axis(time_range: Range1d, step_lines: ColumnDataSource, ideal_ends: ColumnDataSource) -> Any:
    """Draw the time axis, the numbers of the steps, and how much earlier the ideal ends."""
    plot = draw_time_axis(time_range, "axis", AXIS_HEIGHT_PX, tools=[_make_crosshair()])
    numbers = plot.text(x="x", y=0.5, text="label", source=step_lines, x_offset=4, **SMALL_TEXT)
    paint(numbers.glyph, text_color="muted")
    begins = plot.vspan(x="x", source=step_lines, line_width=1, line_dash="2 3")
    paint(begins.glyph, line_color="faint")
    gains = plot.text(x="x", y=0.5, text="label", source=ideal_ends, x_offset=-5, text_align="right", **SMALL_TEXT)
    paint(gains.glyph, text_color="accent")
    return plot


def _make_crosshair() -> CrosshairTool:
    line = Span(dimension="height", line_width=1)
    paint(line, line_color="accent")
    return CrosshairTool(overlay=line)


# Ruler on the timeline: the duration between two times, and how much of it is exposed communication.

RULER_COLUMNS: Final = ("id", "left", "right", "top", "bottom", "x", "y", "label", "text")
_LABELED_PX: Final = 90
"""Minimum height of a rank's lanes for the full text."""


class TimelineRuler:
    """Two times on the lanes of a rank, and the breakdown between them.

    Args:
        rpc: messages of the timeline.
        breakdown: step-time breakdown of the recording.
        shown: the lanes.
    """

    def __init__(self, rpc: BrowserRpc, breakdown: Breakdown, shown: ShownLanes) -> None:
        """Create the messages of the ruler."""
        self._breakdown, self._shown = breakdown, shown
        self.asked = rpc.request("measured", ("id", "from_ns", "to_ns", "rank"), self._on_asked)
        """Request to measure; ``rank`` is an index from the top."""
        self.ruler = rpc.response("ruler", RULER_COLUMNS)

    def draw(self, plot: Any) -> None:
        """Add the ruler to the figure of the lanes."""
        area = plot.quad(**EDGES, source=self.ruler, fill_alpha=0.12, line_width=1.5, level="overlay")
        paint(area.glyph, fill_color="ink", line_color="ink")
        text = plot.text(
            x="x", y="y", text="label", text_align="center", source=self.ruler, level="overlay", **SMALL_TEXT
        )
        text.glyph.update(background_fill_alpha=0.92, padding=4)
        paint(text.glyph, text_color="ink", background_fill_color="surface")

    def _on_asked(self, asked: RequestColumns) -> None:
        if not len(asked["id"]):
            self.ruler.data = make_empty_columns(*RULER_COLUMNS)
            return
        from_ns, to_ns = sorted(int(asked[name][0]) for name in ("from_ns", "to_ns"))
        ranks = self._shown.timeline.ranks
        index = min(max(0, int(asked["rank"][0])), len(ranks) - 1)
        top, bottom = self._shown.layout.rank_px(index)
        text = self._text(from_ns, to_ns, ranks[index])
        self.ruler.data = {
            "id": asked["id"],
            "left": [from_ns],
            "right": [to_ns],
            "top": [top],
            "bottom": [bottom],
            "x": [(from_ns + to_ns) / 2],
            "y": [(top + bottom) / 2],
            "label": [text if bottom - top >= _LABELED_PX else format_ns(to_ns - from_ns)],
            "text": [text],
        }

    def _text(self, from_ns: int, to_ns: int, rank: int) -> str:
        begin_ns = self._shown.timeline.begin_ns
        (ns,) = self._breakdown.timelines[rank].within([from_ns + begin_ns], [to_ns + begin_ns])
        exposed_ns, unknown_ns = (int(ns[BLOCKS.index(name)]) for name in ("exposed", "unattributed"))
        exposed = format_ns(exposed_ns) if exposed_ns else "none"
        missing = f", {format_ns(unknown_ns)} not recorded" if unknown_ns else ""
        return f"{format_ns(to_ns - from_ns)} on rank {rank}, {exposed} of it exposed communication{missing}"


MAX_SPANS: Final = 3_000
"""Number of spans in view above which they are drawn as shades of busy time."""

MAX_IDEAL_STEPS: Final = 20
"""Maximum number of steps over which the ideal is drawn: outlines of more would hide what is below them."""

MAX_PATH_STEPS: Final = 20
"""Maximum number of steps over which the critical path is drawn: a line can't be followed through more."""

_MAX_TOOLTIP_PARAMETERS: Final = 3
"""Number of parameters that a tooltip names, so that it covers little; the panel of a selected span names all."""

MIN_VIEW_NS: Final = 200
"""The shortest view that the browser can zoom to."""


class TimelinePlot:
    """Lanes above each other (``root``), their time axis (``axis``), and the sources that feed them.

    Args:
        snapshot: the recording.
        timeline: lanes of the ranks to show.
        view: range of time to show first; the whole recording if not given.
        layout: layout of the lanes, if not the usual one.
        ends: what is written where the recording of a rank ends.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        timeline: Timeline,
        view: View | None = None,
        layout: LaneLayout | None = None,
        ends: Mapping[int, str] | None = None,
    ) -> None:
        """Create the sources and draw the first view."""
        self._snapshot = snapshot
        self._trace = snapshot.trace
        self.shown = show_lanes(timeline, layout)
        self._ends = ends or {}
        self._exposed = ExposedSpans(snapshot.breakdown, timeline.begin_ns)
        self.rpc = BrowserRpc()
        self.selection = TimelineSelection(self.rpc, self._trace, self.shown, self._show_step)
        self.ruler = TimelineRuler(self.rpc, snapshot.breakdown, self.shown)
        self.area = TimelineArea(self.rpc, self._trace, snapshot.breakdown, self.shown)
        self.spans = ColumnDataSource(data=make_empty_columns(*SPAN_COLUMNS))
        self.hatches = BucketHatches()
        self.segments = ColumnDataSource(name="segments", data=make_empty_columns(*ROUND_COLUMNS))
        self.shades = ColumnDataSource(data=make_empty_columns(*SHADE_COLUMNS))
        self.gaps = ColumnDataSource(data=make_empty_columns("y"))
        self.labels = ColumnDataSource(data=make_empty_columns(*LABEL_COLUMNS))
        self.unfinished = ColumnDataSource(data=make_empty_columns(*EDGES, "category"))
        self.ends = ColumnDataSource(name="ends", data=make_empty_columns(*LANE_END_COLUMNS))
        self.step_labels = ColumnDataSource(data=make_empty_columns("x", "label"))
        self.step_lines = ColumnDataSource(data=make_empty_columns(*STEP_LINE_COLUMNS))
        self.outlines = ColumnDataSource(name="outlines", data=make_empty_columns(*OUTLINE_COLUMNS))
        self.ideal_ends = ColumnDataSource(data=make_empty_columns(*IDEAL_END_COLUMNS))

        self.exposed = ColumnDataSource(name="exposed", data=make_empty_columns(*EXPOSED_COLUMNS))
        self.path = ColumnDataSource(name="path", data=make_empty_columns(*PATH_COLUMNS))

        shown = ("id", "step", "spans", "is_shaded", "ideal_hint", "path_hint", "top_px", "bottom_px")
        wanted = ("id", "from_ns", "to_ns", "width_px", "top_px", "bottom_px", "is_ideal", "is_path")
        self.view = self.rpc.request("view", wanted, self._on_view)
        self.response = self.rpc.response("answer", shown)
        self.pick = self.rpc.request("pick", ("step", "move"), self._on_pick)
        self.picked = self.rpc.response("picked", ("from_ns", "to_ns"))
        self.pointed = self.rpc.request("pointed", ("id", "lane", "row", "round"), self._on_pointed)
        self.tooltip = self.rpc.response("tooltip", TOOLTIP_COLUMNS)
        self.rows = self.rpc.response("rows", ("rank", "top_px", "is_expanded"))
        """The ranks from top to bottom, and after them the height of all as one that is no rank."""

        margin_ns = max(1, timeline.length_ns // 100)
        self.fit: View = (-margin_ns, timeline.length_ns + margin_ns)
        self.extent = self.rpc.response("extent", ("from_ns", "to_ns", "origin_ns", "last_end_ns"))
        """All that can be shown; the origin is that of its times, on the common clock."""
        self.extent.data = {
            "from_ns": [self.fit[0]],
            "to_ns": [self.fit[1]],
            "origin_ns": [timeline.begin_ns],
            "last_end_ns": [max(timeline.steps["end_ns"].tolist(), default=0)],
        }
        first = view or self.fit
        self.time_range = Range1d(start=first[0], end=first[1], bounds=self.fit, min_interval=MIN_VIEW_NS)
        self.root = draw_lanes(
            self.time_range,
            Range1d(start=WINDOW_PX, end=0),
            spans=self.spans,
            hatches=self.hatches,
            segments=self.segments,
            shades=self.shades,
            gaps=self.gaps,
            labels=self.labels,
            unfinished=self.unfinished,
            step_lines=self.step_lines,
            outlines=self.outlines,
            ideal_ends=self.ideal_ends,
            exposed=self.exposed,
            path=self.path,
        )
        _draw_ends(self.root, self.ends)
        self.selection.draw(self.root)
        self.area.draw(self.root)
        self.ruler.draw(self.root)
        self.rpc.attach(self.root)
        self.axis = draw_axis(self.time_range, self.step_labels, self.ideal_ends)
        self._send_rows()
        self.update(first, width_px=1400)

    @property
    def layout(self) -> LaneLayout:
        """Return the layout of the lanes."""
        return self.shown.layout

    def show_ranks(self, timeline: Timeline, layout: LaneLayout) -> None:
        """Show other ranks, or expand others; what is in view is drawn when the browser asks for it."""
        self.shown.timeline, self.shown.layout = timeline, layout
        self.shown.drawn = layout.find_positions(0, 2 * WINDOW_PX)
        self._send_rows()
        self.selection.renew()
        self.area.renew()

    def _send_rows(self) -> None:
        layout = self.shown.layout
        self.rows.data = {
            "rank": [*self.shown.timeline.ranks, -1],
            "top_px": layout.tops_px.tolist(),
            "is_expanded": [*layout.is_expanded, False],
        }

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: connects mouse, keys, address and theme."""
        drawn = {name: getattr(self, name) for name in ("root", "axis", "time_range", "spans", "segments")}
        return CustomJS(
            args={"plot": {**drawn, **self.rpc.sources}},
            code=f"window.overlapscope.startTimeline(plot, {MIN_VIEW_NS})",
        )

    def update(self, view: View, width_px: int) -> int:
        """Draw the contents of a view, ``width_px`` wide on the screen; return the number of spans in view."""
        view_ns = view[1] - view[0]
        wide = (view[0] - view_ns, view[1] + view_ns)
        in_view, around = self._count(view), self._count(wide)
        spans_view = wide if around <= MAX_SPANS else view if in_view <= MAX_SPANS else None
        spans, labels, shades = (
            make_empty_columns(*SPAN_COLUMNS),
            make_empty_columns(*LABEL_COLUMNS),
            make_empty_columns(*SHADE_COLUMNS),
        )
        segments, exposed = make_empty_columns(*ROUND_COLUMNS), make_empty_columns(*EXPOSED_COLUMNS)
        shown, ns_per_px = self.shown, view_ns / width_px
        if spans_view is not None:
            spans = build_span_columns(shown, spans_view, 1.25 * ns_per_px)
            exposed = build_exposed_columns(self._exposed, shown, spans_view)
            names = build_label_columns(shown.timeline, spans, exposed, view, width_px, self._trace.collectives)
            durations = build_duration_columns(exposed, view, width_px)
            labels = {name: names[name] + durations[name] for name in LABEL_COLUMNS}
            segments = build_round_columns(self._snapshot.rounds, shown, spans_view, ns_per_px)
        if spans_view != wide:
            shades = build_shade_columns(shown, self._exposed, wide, 3 * width_px, without=spans_view)
        steps = shown.timeline.steps
        lined = steps["step"].to_numpy()[thin_out_steps(steps, wide, 3 * width_px)]
        edges = [shown.layout.lane_px(lane)[edge] for lane in shown.drawn_lanes for edge in (0, 1)]
        # The browser stops drawing with the first of these, until it has the response that follows them.
        self.spans.data = spans
        self.hatches.update(spans)
        drawn = (
            (self.shades, shades),
            (self.gaps, {"y": edges if len(shades["image"]) else []}),
            (self.labels, labels),
            (self.step_lines, build_step_line_columns(shown, lined, wide)),
            (self.step_labels, build_step_label_columns(steps, view, width_px)),
            (self.exposed, exposed),
            (self.segments, segments),
            (self.unfinished, build_unfinished_columns(shown)),
            (self.ends, build_lane_end_columns(shown, self._ends)),
        )
        for source, columns in drawn:
            update_source(source, columns)
        return in_view

    def draw_ranks(self, positions: range) -> None:
        """Draw other ranks from now on; of a selection too."""
        if positions != self.shown.drawn:
            self.shown.drawn = positions
            self.selection.redraw()

    def update_ideal(self, view: View, width_px: int, *, is_wanted: bool) -> str:
        """Draw the ideal over what was recorded, or remove it.

        Returns:
            Why it can't be drawn although it is wanted; empty if it is.
        """
        ideal, hint = self._ideal(view) if is_wanted else (None, "")
        outlines, ends = make_empty_columns(*OUTLINE_COLUMNS), make_empty_columns(*IDEAL_END_COLUMNS)
        if ideal is not None:
            ns_per_px = (view[1] - view[0]) / width_px
            outlines = build_outline_columns(ideal, self.shown, ns_per_px)
            ends = build_ideal_end_columns(ideal, self.shown.timeline.begin_ns, ns_per_px)
        update_source(self.outlines, outlines)
        update_source(self.ideal_ends, ends)
        return hint

    def update_path(self, view: View, *, is_wanted: bool) -> str:
        """Draw the critical path over the lanes, or remove it.

        Returns:
            Why it can't be drawn although it is wanted; empty if it is.
        """
        job = self._snapshot.summary.job_breakdown if is_wanted else None
        is_short = self._count_steps(view) <= MAX_PATH_STEPS
        columns = make_empty_columns(*PATH_COLUMNS)
        if job is not None and is_short:
            view_ns = view[1] - view[0]
            wide = view[0] - view_ns, view[1] + view_ns
            columns = build_path_columns(job.path, self.shown, wide)
        update_source(self.path, columns)
        if not is_wanted:
            return ""
        if job is None:
            return "needs steps that all ranks have finished, on one clock"
        return "" if is_short else f"zoom in to {MAX_PATH_STEPS} steps or fewer"

    def _count(self, view: View) -> int:
        return sum(self.shown.timeline.lanes[lane].spans.count(*view) for lane in self.shown.drawn_lanes)

    def _ideal(self, view: View) -> tuple[IdealCycles | None, str]:
        """Return the ideal of the cycles in view, or why there is none."""
        if self._count_steps(view) > MAX_IDEAL_STEPS:
            return None, f"zoom in to {MAX_IDEAL_STEPS} steps or fewer"
        # Cycles of a large recording take seconds: they are not computed before they are needed.
        replay, begin_ns = self._snapshot.replay, self.shown.timeline.begin_ns
        if replay is None:
            return None, "needs two ranks on one clock, and steps after the warm-up"
        ideal = compute_ideal(replay, view[0] + begin_ns, view[1] + begin_ns)
        return (ideal, "") if len(ideal.cycles) else (None, "no ideal is known for the steps in view")

    def _count_steps(self, view: View) -> int:
        steps = self.shown.timeline.steps
        return int(((steps["start_ns"] < view[1]) & (steps["end_ns"] > view[0])).sum())

    def _on_view(self, args: RequestColumns) -> None:
        view = (int(args["from_ns"][0]), int(args["to_ns"][0]))
        width_px = int(args["width_px"][0])
        top_px, bottom_px = float(args["top_px"][0]), float(args["bottom_px"][0])
        more_px = (bottom_px - top_px) / 2
        self.draw_ranks(self.layout.find_positions(top_px - more_px, bottom_px + more_px))
        self.update(view, width_px)
        visible = self.shown.lanes_of(self.layout.find_positions(top_px, bottom_px))
        in_view = sum(self.shown.timeline.lanes[lane].spans.count(*view) for lane in visible)
        ideal_hint = self.update_ideal(view, width_px, is_wanted=bool(args["is_ideal"][0]))
        path_hint = self.update_path(view, is_wanted=bool(args["is_path"][0]))
        # Last, because the browser waits for it, and then has everything else.
        self.response.data = {
            "id": args["id"],
            "step": [find_step(self.shown.timeline, sum(view) // 2)],
            "spans": [in_view],
            "is_shaded": [len(self.spans.data["left"]) == 0 and in_view > 0],
            "ideal_hint": [ideal_hint],
            "path_hint": [path_hint],
            "top_px": [int(self.layout.tops_px[self.shown.drawn.start])],
            "bottom_px": [int(self.layout.tops_px[self.shown.drawn.stop])],
        }

    def _on_pick(self, args: RequestColumns) -> None:
        self._show_step(int(args["step"][0]), int(args["move"][0]))

    def _show_step(self, step: int, move: int = 0) -> None:
        view = compute_step_view(self.shown.timeline, step, move)
        if view is not None:
            self.picked.data = {"from_ns": [view[0]], "to_ns": [view[1]]}

    def _on_pointed(self, args: RequestColumns) -> None:
        lane = self.shown.timeline.lanes[int(args["lane"][0])]
        details = get_span_details(self._trace, self.shown.timeline.begin_ns, lane, int(args["row"][0]))
        title, rows = build_tooltip(details, _MAX_TOOLTIP_PARAMETERS)
        if lane.name == "phases" and (exposed_ns := self._exposed.measure(lane, int(args["row"][0]))):
            rows.append(("of it exposed", format_ns(exposed_ns)))
        if (index := int(args["round"][0])) >= 0:
            rows += build_round_rows(self._trace.segments.iloc[index])
        self.tooltip.data = build_tooltip_columns(args, title, rows)


def compute_step_view(timeline: Timeline, step: int, move: int = 0) -> View | None:
    """Return the view that shows one step of all ranks, with a small margin; None if there are no steps.

    If the step was not recorded, this is the nearest recorded one. ``move`` steps later or earlier stop at the last and
    the first: of the recorded steps 10, 11 and 12, step 11 with ``move=5`` gives 12.
    """
    steps = timeline.steps
    if steps.empty:
        return None
    index = int((steps["step"] - step).abs().to_numpy().argmin())
    row = steps.iloc[min(max(0, index + move), len(steps) - 1)]
    margin_ns = max(1, int(row["end_ns"] - row["start_ns"]) // 40)
    return int(row["start_ns"]) - margin_ns, int(row["end_ns"]) + margin_ns


def find_step(timeline: Timeline, time_ns: int) -> int | None:
    """Return the number of the step that contains a time, or of the last step before it."""
    steps = timeline.steps
    index = int(np.searchsorted(steps["start_ns"].to_numpy(), time_ns, side="right")) - 1
    return None if steps.empty else int(steps["step"].iloc[max(0, index)])
