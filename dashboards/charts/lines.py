"""Lines over one axis, with intervals where they are known."""

from __future__ import annotations

import math

from dashboards.charts.axes import area_of, horizontal_grid, labels_below, labels_of, scene_of
from dashboards.charts.frame import Frame, Scale, Tick, nice_ticks
from dashboards.charts.scene import Dot, Path, Scene, Shape, Text
from overlapscope.lab.experiments.charts import LineChart, LineSeries

COLORS = ("span-bucket-0", "span-bucket-1", "span-bucket-2", "span-bucket-3", "span-bucket-5", "span-bucket-7")
_LETTER_PX = 6.6
_MARGIN = 0.04
"""Share of the width that points keep from the edges."""


def draw_lines(chart: LineChart) -> Scene:
    """All lines, the first one on top."""
    labeled = [line for line in chart.lines if line.label]
    area = area_of(has_legend=bool(labeled))
    xs = [x for line in chart.lines for x in line.x]
    ends = [
        y for line in chart.lines for y in (*line.y, *line.high, *_percentile(line.unsmoothed_y)) if not math.isnan(y)
    ]
    high = 1.05 * max(ends, default=1.0) or 1.0
    to_y = area.y(0.0, high)
    to_x = _x_scale(area, min(xs, default=0.0), max(xs, default=1.0), is_log=chart.is_log)
    shapes = horizontal_grid(area, to_y, high, chart.y_label, chart.y_unit)
    for line in reversed(chart.lines):
        shapes += _line(line, to_x, to_y, chart)
    return scene_of(
        chart.title, [*shapes, *_legend(labeled), *labels_below(area, _x_ticks(chart, to_x), chart.x_label)]
    )


def _line(line: LineSeries, to_x: Scale, to_y: Scale, chart: LineChart) -> list[Shape]:
    color = COLORS[line.color % len(COLORS)]
    x, y = to_x(line.x).tolist(), to_y(line.y).tolist()
    shapes: list[Shape] = []
    if line.unsmoothed_y:
        faint = zip(x, to_y(line.unsmoothed_y).clip(min=0).tolist(), strict=True)
        shapes.append(Path(points=tuple(faint), color=color, opacity=0.22))
    for at, low, high in zip(x, line.low, line.high, strict=False):
        if not math.isnan(low + high):
            shapes.append(Path(points=((at, float(to_y(low))), (at, float(to_y(high)))), color=color, width=1.5))
    shapes.append(Path(points=tuple(zip(x, y, strict=True)), color=color, width=2, is_dashed=line.style == "predicted"))
    if line.style != "smooth":
        said_x, said_y = labels_of(line.x, chart.x_unit), [labels_of([each], chart.y_unit)[0] for each in line.y]
        name = f"{line.label}: " if line.label else ""
        fill = color if line.style == "measured" else "surface"
        for at, height, one, other in zip(x, y, said_x, said_y, strict=True):
            shapes.append(Dot(x=at, y=height, fill=color, tip=f"{name}{one}, {other}"))
            if fill != color:
                shapes.append(Dot(x=at, y=height, fill=fill, radius=2.5, tip=f"{name}{one}, {other}"))
    return shapes


def _legend(lines: list[LineSeries]) -> list[Shape]:
    shapes: list[Shape] = []
    x = 0.0
    for line in lines:
        color = COLORS[line.color % len(COLORS)]
        ends = ((x, 31.0), (x + 18, 31.0))
        shapes.append(Path(points=ends, color=color, width=2, is_dashed=line.style == "predicted"))
        shapes.append(Text(x=x + 24, y=35, text=line.label))
        x += 44 + _LETTER_PX * len(line.label)
    return shapes


def _x_scale(area: Frame, low: float, high: float, *, is_log: bool) -> Scale:
    if is_log:
        margin = (high / low) ** _MARGIN if high > low else 2.0
        return area.x(low / margin, high * margin, is_log=True)
    return area.x(min(0.0, low), high if high > low else low + 1)


def _x_ticks(chart: LineChart, to_x: Scale) -> list[Tick]:
    """Where it is logarithmic at the points, else at round numbers."""
    xs = sorted({x for line in chart.lines for x in line.x})
    ticks = xs if chart.is_log else nice_ticks(0.0, max(xs, default=1.0), 6)
    return list(zip(to_x(ticks).tolist(), labels_of(ticks, chart.x_unit), strict=True))


def _percentile(values: tuple[float, ...]) -> tuple[float, ...]:
    """What nearly all of some values are below: a few high ones should not flatten the rest."""
    return (sorted(values)[int(0.99 * len(values))],) if values else ()
