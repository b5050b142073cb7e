"""Plot of step time over bucket size, and of a step with the chosen size."""

from __future__ import annotations

from typing import Any, Final

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    FixedTicker,
    NoOverlap,
    Range1d,
)
from bokeh.plotting import figure

from dashboards.assets import read_asset
from dashboards.forecast import ChosenPlan, Forecast
from dashboards.plots import bucket_columns
from dashboards.plots.browser_rpc import TOOLTIP_COLUMNS, BrowserRpc, RequestColumns, build_tooltip_columns
from dashboards.plots.bucket_columns import (
    BucketLayout,
    Tooltip,
    build_parameter_tooltip,
    build_size_tooltip,
    build_step_tooltip,
)
from dashboards.plots.wide_figure import (
    SMALL_TEXT,
    BucketHatches,
    draw_span_text,
    draw_spans,
    draw_time_axis,
    make_span_mapper,
    make_wide_figure,
    style_axis,
)
from dashboards.theme import paint
from overlapscope.bucket_model.prediction import Curve
from overlapscope.bucket_model.schedule import DrawnStep

# Bokeh figures of the Buckets page: step time against bucket size, two steps, and a plan.

CURVE_LEFT_PX: Final = 66
CURVE_RIGHT_PX: Final = 18
"""Margins to the left and right of the curve's frame, which the slider below it also has."""
_SIZES_MB: Final = [mantissa * 10.0**exponent for exponent in range(-4, 6) for mantissa in (1, 2, 5)]
_SIZE_LABELS: Final = "return tick.toLocaleString('en-US', {maximumSignificantDigits: 3}) + ' MB'"
_CURVE_HEIGHT_PX: Final = 220
_STRIP_HEIGHT_PX: Final = 30


def draw_curve(
    size_range: Range1d,
    time_range: Range1d,
    *,
    curve: ColumnDataSource,
    free: ColumnDataSource,
    marks: ColumnDataSource,
    measured: ColumnDataSource,
    chosen: ColumnDataSource,
) -> Any:
    """Draw the predicted step time against bucket size; x is MB."""
    plot: Any = figure(
        x_range=size_range,
        y_range=time_range,
        x_axis_type="log",
        height=_CURVE_HEIGHT_PX,
        sizing_mode="stretch_width",
        min_border=0,
        min_border_left=CURVE_LEFT_PX,
        min_border_right=CURVE_RIGHT_PX,
        toolbar_location=None,
        tools=[],
        outline_line_color=None,
        name="curve",
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.xaxis.ticker = FixedTicker(ticks=_SIZES_MB)
    plot.xaxis.major_label_policy = NoOverlap(min_distance=8)
    plot.xaxis.formatter = CustomJSTickFormatter(code=_SIZE_LABELS)
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=5)
    plot.yaxis.formatter = CustomJSTickFormatter(code=read_asset("time_ticks.js"))
    for axis in (*plot.xaxis, *plot.yaxis):
        style_axis(axis)
    plot.yaxis.update(axis_line_color=None, major_tick_line_color=None)
    for grid in plot.grid:
        paint(grid, grid_line_color="grid")
    band = plot.varea(x="x", y1="low", y2="high", source=curve, fill_alpha=0.17)
    paint(band.glyph, fill_color="accent")
    best = plot.hspan(y="y", source=free, line_width=1.5, line_dash="6 4")
    paint(best.glyph, line_color="hidden")
    name = plot.text(
        x="x", y="y", text="text", source=free, text_align="align", x_offset="x_offset", y_offset=9, **SMALL_TEXT
    )
    paint(name.glyph, text_color="hidden")
    now = plot.vspan(x="x", source=chosen, line_width=1.5)
    paint(now.glyph, line_color="accent")
    line = plot.line(x="x", y="predicted", source=curve, line_width=2, line_join="round")
    paint(line.glyph, line_color="accent")
    spread = plot.segment(x0="x", x1="x", y0="low", y1="high", source=measured, line_width=1.5)
    paint(spread.glyph, line_color="ink")
    points = plot.scatter(x="x", y="y", source=measured, size=8, line_width=1.5)
    paint(points.glyph, line_color="ink", fill_color="surface")
    dots = plot.scatter(x="x", y="y", source=marks, size=11, marker="diamond", line_color=None)
    paint(dots.glyph, fill_color="hidden")
    names = plot.text(
        x="x",
        y="y",
        text="text",
        source=marks,
        text_align="align",
        x_offset="x_offset",
        y_offset="y_offset",
        **SMALL_TEXT,
    )
    names.glyph.update(background_fill_alpha=0.8, padding=1)
    paint(names.glyph, text_color="ink", background_fill_color="surface")
    dot = plot.scatter(x="x", y="y", source=chosen, size=11, line_width=2)
    paint(dot.glyph, fill_color="accent", line_color="surface")
    return plot


def draw_fixed_curve(curve: Curve) -> Any:
    """Draw the predicted step time against bucket size where nothing is chosen."""
    sizes_mb, times_ns = bucket_columns.compute_size_range_mb(curve), bucket_columns.compute_time_range_ns(curve)
    return draw_curve(
        Range1d(start=sizes_mb[0], end=sizes_mb[1]),
        Range1d(start=times_ns[0], end=times_ns[1]),
        curve=ColumnDataSource(data=bucket_columns.build_curve_columns(curve, sizes_mb)),
        free=ColumnDataSource(data=bucket_columns.build_best_plan_columns(curve, sizes_mb)),
        marks=ColumnDataSource(data=bucket_columns.build_mark_columns(curve, sizes_mb)),
        measured=ColumnDataSource(data=bucket_columns.build_measured_columns(curve)),
        chosen=ColumnDataSource(data={"x": [], "y": []}),
    )


def draw_steps(
    layout: BucketLayout,
    time_range: Range1d,
    *,
    spans: tuple[ColumnDataSource, ...],
    hatches: tuple[BucketHatches, ...],
    ready: tuple[ColumnDataSource, ...],
    labels: tuple[ColumnDataSource, ...],
    ends: tuple[ColumnDataSource, ...],
) -> Any:
    """Draw the recorded step and below it the predicted one; y is pixels from the top."""
    plot = make_wide_figure(time_range, Range1d(start=layout.height_px, end=0), layout.height_px, "steps")
    plot.xaxis.visible = False
    color = {"field": "category", "transform": make_span_mapper()}
    for source in spans:
        draw_spans(plot, source)
    for each in hatches:
        each.draw(plot)
    for source in ready:
        plot.segment(x0="x", x1="x", y0="top", y1="bottom", source=source, line_color=color, line_width=3)
    for source in ends:
        line = plot.segment(x0="x", x1="x", y0="top", y1="bottom", source=source, line_width=1.5, line_dash="4 3")
        paint(line.glyph, line_color="ink")
        text = plot.text(x="x", y="y", text="text", source=source, x_offset=-6, text_align="right", **SMALL_TEXT)
        paint(text.glyph, text_color="ink")
    for source in labels:
        draw_span_text(plot, source)
    return plot


def draw_strip(total_bytes: int, strip: ColumnDataSource, hatches: BucketHatches, labels: ColumnDataSource) -> Any:
    """Draw the plan, from the first gradient to the last; x is bytes."""
    plot = make_wide_figure(
        Range1d(start=0, end=max(1, total_bytes)), Range1d(start=0, end=1), _STRIP_HEIGHT_PX, "strip"
    )
    plot.xaxis.visible = False
    plot.toolbar.tools = []
    parts = draw_spans(plot, strip, line_width=1)
    paint(parts.glyph, line_color="surface")
    hatches.draw(plot)
    draw_span_text(plot, labels, text_align="center")
    return plot


MAX_DRAWN_RANKS: Final = 4
_FIRST_WIDTH_PX: Final = 1150
_AXIS_MARGIN: Final = 1.03


class BucketsPlot:
    """The curve, the two steps with their axis, the strip of the plan (``roots``), and the messages to the browser.

    Args:
        forecast: predictions for the recording.
        chosen: the plan to begin with.
    """

    def __init__(self, forecast: Forecast, chosen: ChosenPlan) -> None:
        """Create the sources and draw the first choice."""
        self._forecast = forecast
        recorded = forecast.step.recorded
        self.shown = select_ranks(recorded)
        self.layout = BucketLayout(ranks=len(self.shown))
        self.curve = ColumnDataSource(data=dict.fromkeys(bucket_columns.CURVE_COLUMNS, ()))
        self.free = ColumnDataSource(data={name: [] for name in bucket_columns.BEST_PLAN_COLUMNS})
        self.marks = ColumnDataSource(data=dict.fromkeys(bucket_columns.MARK_COLUMNS, ()))
        self.measured = ColumnDataSource(data=dict.fromkeys(bucket_columns.MEASURED_COLUMNS, ()))
        self.point = ColumnDataSource(data={"x": [], "y": []})
        self.spans, self.ready, self.labels, self.ends = (
            (ColumnDataSource(data=dict.fromkeys(names, ())), ColumnDataSource(data=dict.fromkeys(names, ())))
            for names in (
                bucket_columns.SPAN_COLUMNS,
                bucket_columns.READY_COLUMNS,
                bucket_columns.LABEL_COLUMNS,
                bucket_columns.END_COLUMNS,
            )
        )
        self.strip = ColumnDataSource(data=bucket_columns.build_strip_columns(forecast.gradients, recorded.plan))
        self.hatches = BucketHatches(), BucketHatches()
        self.strip_hatches = BucketHatches()
        self.strip_labels = ColumnDataSource(data=dict.fromkeys(bucket_columns.LABEL_COLUMNS, ()))

        self.rpc = BrowserRpc()
        self.pointed = self.rpc.request("pointed", ("id", "plot", "x", "y", "ns_per_px"), self._on_pointed)
        self.tooltip = self.rpc.response("tooltip", TOOLTIP_COLUMNS)

        self.size_range, self.time_range = Range1d(), Range1d()
        self._length_ns = _compute_axis_length_ns(forecast) * _AXIS_MARGIN
        self.step_range = Range1d(start=0, end=self._length_ns, bounds=(0, self._length_ns))
        self.root = draw_curve(
            self.size_range,
            self.time_range,
            curve=self.curve,
            free=self.free,
            marks=self.marks,
            measured=self.measured,
            chosen=self.point,
        )
        self.rpc.attach(self.root)
        self.steps = draw_steps(
            self.layout,
            self.step_range,
            spans=self.spans,
            hatches=self.hatches,
            ready=self.ready,
            labels=self.labels,
            ends=self.ends,
        )
        self.time = draw_time_axis(self.step_range, "time")
        self.plan = draw_strip(forecast.gradients.total_bytes, self.strip, self.strip_hatches, self.strip_labels)
        self._width_px = _FIRST_WIDTH_PX
        self._draw_curve(chosen.curve)
        self._draw_step(0, recorded)
        self.chosen = chosen
        self.update(chosen)

    @property
    def roots(self) -> list[Any]:
        """Return all figures."""
        return [self.root, self.steps, self.time, self.plan]

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: connects slider, mouse, keys and address."""
        drawn = {name: getattr(self, name) for name in ("root", "steps", "time", "plan", "size_range", "step_range")}
        return CustomJS(
            args={"plot": {**drawn, **self.rpc.sources}},
            code="window.overlapscope.startBuckets(plot)",
        )

    def update(self, chosen: ChosenPlan, width_px: int = _FIRST_WIDTH_PX) -> None:
        """Show another plan, in steps of another width."""
        if width_px != self._width_px:
            self._width_px = width_px
            self._draw_step(0, self._forecast.step.recorded)
        if chosen.curve is not self.chosen.curve:
            self._draw_curve(chosen.curve)
        self.chosen, plan = chosen, chosen.plan
        self._draw_step(1, chosen.step)
        gradients = self._forecast.gradients
        strip = bucket_columns.build_strip_columns(gradients, plan)
        self.strip.data = strip
        self.strip_hatches.update(strip)
        bytes_per_px = gradients.total_bytes / self._width_px
        self.strip_labels.data = bucket_columns.build_strip_label_columns(gradients, plan, bytes_per_px)
        x_mb, y_ns = self.shown_mb, [float(chosen.curve.predicted_ns[chosen.index])]
        self.point.data = {"x": [] if x_mb is None else [x_mb], "y": [] if x_mb is None else y_ns}

    @property
    def cap_mb(self) -> float | None:
        """Return the size that is chosen; None if no size gives the plan."""
        choice, curve, index = self.chosen.choice, self.chosen.curve, self.chosen.index
        if choice.special is None and choice.cap_mb is not None:
            return choice.cap_mb
        return curve.sizes[index].cap_mb if index < len(curve.sizes) else None

    @property
    def shown_mb(self) -> float | None:
        """Return the position of the choice on the axis of sizes; None if no size gives the plan."""
        choice = self.chosen.choice
        is_size = choice.special is None and choice.cap_mb is not None
        return choice.cap_mb if is_size else bucket_columns.find_axis_mb(self.chosen.curve, self.chosen.index)

    def _draw_curve(self, curve: Curve) -> None:
        sizes_mb, times_ns = bucket_columns.compute_size_range_mb(curve), bucket_columns.compute_time_range_ns(curve)
        self.size_range.update(start=sizes_mb[0], end=sizes_mb[1])
        self.time_range.update(start=times_ns[0], end=times_ns[1])
        self.curve.data = bucket_columns.build_curve_columns(curve, sizes_mb)
        self.marks.data = bucket_columns.build_mark_columns(curve, sizes_mb)
        self.measured.data = bucket_columns.build_measured_columns(curve)
        self.free.data = bucket_columns.build_best_plan_columns(curve, sizes_mb)

    def _draw_step(self, index: int, step: DrawnStep) -> None:
        ns_per_px = self._length_ns / self._width_px
        spans = bucket_columns.build_span_columns(step, self.shown, self.layout, index)
        self.spans[index].data = spans
        self.hatches[index].update(spans)
        self.ready[index].data = bucket_columns.build_ready_columns(step, self.shown, self.layout, index)
        self.labels[index].data = bucket_columns.build_label_columns(step, self.shown, self.layout, index, ns_per_px)
        self.ends[index].data = bucket_columns.build_end_columns(step, self.layout, index)

    def _on_pointed(self, asked: RequestColumns) -> None:
        title, rows = self._tooltip(asked["plot"][0], float(asked["x"][0]), float(asked["y"][0]), asked)
        self.tooltip.data = build_tooltip_columns(asked, title, rows)

    def _tooltip(self, plot: str, x: float, y: float, asked: RequestColumns) -> Tooltip:
        if plot == "curve":
            return build_size_tooltip(self.chosen.curve, x)
        if plot == "strip":
            return build_parameter_tooltip(self._forecast.gradients, self.chosen.plan, x)
        step = self._forecast.step.recorded if y < self.layout.step_px else self.chosen.step
        return build_step_tooltip(step, self.shown, self.layout, x, y, float(asked["ns_per_px"][0]))


def select_ranks(step: DrawnStep) -> list[int]:
    """Return indices of the ranks to draw: all, or of many the first and last to end backward and some between."""
    count = len(step.ranks)
    if count <= MAX_DRAWN_RANKS:
        return list(range(count))
    by_end = step.backward_end_ns.argsort().tolist()
    return sorted(by_end[round(at * (count - 1) / (MAX_DRAWN_RANKS - 1))] for at in range(MAX_DRAWN_RANKS))


def _compute_axis_length_ns(forecast: Forecast) -> float:
    """Return the length of the time axis: it fits all but very slow plans, so that it stays when the slider moves."""
    recorded_ns = forecast.step.recorded.cycle_ns
    return max(recorded_ns, min(float(forecast.reference.predicted_ns.max()), 1.6 * recorded_ns))
