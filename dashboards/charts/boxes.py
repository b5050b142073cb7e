"""Box plots beside each other."""

from __future__ import annotations

from dashboards.charts.axes import area_of, horizontal_grid, labels_below, scene_of
from dashboards.charts.scene import Path, Rectangle, Scene, Shape
from overlapscope.lab.experiments.charts import Box, BoxPlotChart
from overlapscope.text import format_ns

_WIDEST_PX = 44.0


def draw_boxes(chart: BoxPlotChart) -> Scene:
    """Boxes from the left, over a time axis from 0 up."""
    area = area_of()
    high = 1.05 * max((box.high_ns for box in chart.boxes), default=1.0)
    scale = area.y(0.0, high)
    every = (area.right - area.left) / max(1, len(chart.boxes))
    middles = [area.left + (place + 0.5) * every for place in range(len(chart.boxes))]
    shapes = horizontal_grid(area, scale, high, "step", "ns")
    for box, middle in zip(chart.boxes, middles, strict=True):
        low, bottom, median, top, end = (
            float(scale(ns)) for ns in (box.low_ns, box.quartile_1_ns, box.median_ns, box.quartile_3_ns, box.high_ns)
        )
        shapes += _box(box, middle, min(_WIDEST_PX, 0.5 * every), (low, bottom, median, top, end))
    ticks = [(middle, box.label) for middle, box in zip(middles, chart.boxes, strict=True)]
    return scene_of(chart.title, [*shapes, *labels_below(area, ticks, chart.x_label)])


def _box(box: Box, middle: float, width: float, places: tuple[float, float, float, float, float]) -> list[Shape]:
    low, bottom, median, top, high = places
    left, right = middle - width / 2, middle + width / 2
    tip = (
        f"{box.label}: median {format_ns(box.median_ns)}, quartiles {format_ns(box.quartile_1_ns)} and "
        f"{format_ns(box.quartile_3_ns)}, of {box.count:,} steps"
    )
    height = max(1.0, bottom - top)
    return [
        Path(points=((middle, low), (middle, bottom)), color="muted"),
        Path(points=((middle, top), (middle, high)), color="muted"),
        *(Path(points=((left + width / 4, y), (right - width / 4, y)), color="muted") for y in (low, high)),
        Rectangle(x=left, y=top, width=width, height=height, fill="block-forward", edge="accent", tip=tip),
        Path(points=((left, median), (right, median)), color="ink", width=2.0),
    ]
