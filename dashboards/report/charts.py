"""Charts of the report as SVG for a page without Bokeh: the columns of the plots, in pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dashboards.plots.bucket_columns import (
    build_best_plan_columns,
    build_curve_columns,
    build_mark_columns,
    build_measured_columns,
    compute_size_range_mb,
    compute_time_range_ns,
)
from dashboards.plots.trend import FIGURES, TrendPlot
from dashboards.report.frame import Frame, Scale, Tick, nice_ticks, time_labels
from overlapscope.breakdown.summary import Summary
from overlapscope.bucket_model.curve import Curve
from overlapscope.text import format_share

_SIZES_MB: Final = tuple(mantissa * 10.0**exponent for exponent in range(-4, 6) for mantissa in (1, 2, 5))
_MIN_TICK_DISTANCE_PX: Final = 56


@dataclass(frozen=True, kw_only=True)
class TrendChart:
    """One figure over the steps."""

    title: str
    color: str
    """Role in ``dashboards.theme`` that gives the color."""
    frame: Frame
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    band: str
    """SVG path of the range of all ranks."""
    mean: str
    ranks: tuple[str, ...]
    warm_up_px: float
    """End of the warm-up."""
    points: tuple[tuple[float, float, str], ...]
    """Left edge, width and text of each point, for the pointer."""


@dataclass(frozen=True, kw_only=True)
class CurveChart:
    """Step time by bucket size."""

    frame: Frame
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    band: str
    predicted: str
    marks: tuple[tuple[float, float, str, str], ...]
    """Position (x, y), text and side of each mark."""
    measured: tuple[tuple[float, float, float, float], ...]
    """x, y, and both ends of the interval."""
    free: tuple[tuple[float, str], ...]
    """Height and name of the best plan of all, if no size gives it."""


def build_trend_charts(summary: Summary) -> list[TrendChart]:
    """Return all trends of the overview."""
    return [_trend(TrendPlot(shown, summary)) for shown in FIGURES]


def build_curve_chart(curve: Curve) -> CurveChart:
    """Return the chart of step time by bucket size."""
    frame = Frame.of(1160, 240)
    sizes_mb, times_ns = compute_size_range_mb(curve), compute_time_range_ns(curve)
    x, y = frame.x(*sizes_mb, is_log=True), frame.y(*times_ns)
    line, marks, measured = (
        build_curve_columns(curve, sizes_mb),
        build_mark_columns(curve, sizes_mb),
        build_measured_columns(curve),
    )
    free = build_best_plan_columns(curve, sizes_mb)
    in_view = np.array([size for size in _SIZES_MB if sizes_mb[0] <= size <= sizes_mb[1]])
    return CurveChart(
        frame=frame,
        x_ticks=_thin_out_ticks([(float(px), f"{size:,g} MB") for px, size in zip(x(in_view), in_view, strict=True)]),
        y_ticks=_build_ticks(y, *times_ns, time_labels),
        band=_build_svg_band(x(line["x"]), y(line["low"]), y(line["high"])),
        predicted=_build_svg_path(x(line["x"]), y(line["predicted"])),
        marks=tuple(zip(x(marks["x"]), y(marks["y"]), marks["text"], marks["align"], strict=True)),
        measured=tuple(zip(x(measured["x"]), *(y(measured[name]) for name in ("y", "low", "high")), strict=True)),
        free=tuple(zip(y(free["y"]).tolist(), free["text"], strict=True)),
    )


def _trend(plot: TrendPlot) -> TrendChart:
    columns: dict[str, Any] = dict(plot.source.data)
    lines: dict[str, Any] = dict(plot.rank_lines.data)
    end: Any = plot.y_range.end
    frame, steps = Frame.of(430, 190), np.asarray(columns["step"], dtype=float)
    first, last = (steps.min(), steps.max()) if len(steps) else (0.0, 1.0)
    x, y = frame.x(first - 0.5, last + 0.5), frame.y(0.0, end)
    edges = np.append(x(steps), frame.right)
    in_view = np.array([tick for tick in nice_ticks(first, last, 6) if tick == int(tick)])
    return TrendChart(
        title=plot.shown.title,
        color=plot.shown.color,
        frame=frame,
        x_ticks=tuple((float(px), f"{tick:,.0f}") for px, tick in zip(x(in_view), in_view, strict=True)),
        y_ticks=_build_ticks(y, 0.0, end, _share_labels if plot.shown.is_share else time_labels),
        band=_build_svg_band(x(steps), y(columns["low"]), y(columns["high"])),
        mean=_build_svg_path(x(steps), y(columns["mean"])),
        ranks=tuple(_build_svg_path(x(xs), y(ys)) for xs, ys in zip(lines["xs"], lines["ys"], strict=True)),
        warm_up_px=float(x(plot.warm_up.right)) if plot.warm_up.visible else 0.0,
        points=tuple(zip(edges[:-1].tolist(), np.diff(edges).tolist(), columns["text"], strict=True)),
    )


def _build_ticks(
    scale: Scale, low: float, high: float, labels: Callable[[Sequence[float]], list[str]]
) -> tuple[Tick, ...]:
    ticks = nice_ticks(low, high, 4)
    return tuple(zip(scale(np.array(ticks)).tolist(), labels(ticks), strict=True))


def _share_labels(ticks: Sequence[float]) -> list[str]:
    return [format_share(tick).replace(".0 ", " ") for tick in ticks]


def _thin_out_ticks(ticks: list[Tick]) -> tuple[Tick, ...]:
    """Drop the ticks that would touch the one before."""
    clear_ticks: list[Tick] = []
    for tick in ticks:
        if not clear_ticks or tick[0] - clear_ticks[-1][0] >= _MIN_TICK_DISTANCE_PX:
            clear_ticks.append(tick)
    return tuple(clear_ticks)


def _build_svg_path(x: npt.ArrayLike, y: npt.ArrayLike) -> str:
    return "M" + "L".join(_format_points(x, y)) if np.size(x) else ""


def _build_svg_band(x: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> str:
    there, back = _format_points(x, low), _format_points(x, high)
    return "M" + "L".join([*there, *reversed(back)]) + "Z" if there else ""


def _format_points(x: npt.ArrayLike, y: npt.ArrayLike) -> list[str]:
    return [f"{a:.1f},{b:.1f}" for a, b in zip(np.atleast_1d(x), np.atleast_1d(y), strict=True)]
