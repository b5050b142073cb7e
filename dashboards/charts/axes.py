"""The area of a chart and what is written around it."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.charts.frame import Frame, Scale, Tick, nice_ticks, time_labels
from dashboards.charts.scene import Path, Scene, Shape, Text
from overlapscope.lab.experiments.charts import Unit
from overlapscope.text import format_count

WIDTH_PX = 620
HEIGHT_PX = 300
TITLE_PX = 26
"""Room above the area."""
LEGEND_PX = 20
"""Room for a legend below the title."""
LEFT_PX, RIGHT_PX, BOTTOM_PX = 74, 16, 46
_LEAST_BETWEEN_PX = 44.0


def area_of(*, has_legend: bool = False) -> Frame:
    """Where data are drawn."""
    return Frame(
        width=WIDTH_PX,
        height=HEIGHT_PX,
        left=LEFT_PX,
        right=WIDTH_PX - RIGHT_PX,
        top=TITLE_PX + LEGEND_PX * has_legend,
        bottom=HEIGHT_PX - BOTTOM_PX,
    )


def scene_of(title: str, shapes: Sequence[Shape], height: float = HEIGHT_PX) -> Scene:
    """A chart with its title."""
    head = Text(x=0, y=14, text=title, color="ink", size=13, is_bold=True)
    return Scene(title=title, width=WIDTH_PX, height=height, shapes=(head, *shapes))


def horizontal_grid(area: Frame, scale: Scale, high: float, label: str, unit: Unit) -> list[Shape]:
    """Lines at round numbers from 0 up, and what they are of."""
    ticks = nice_ticks(0.0, high, 5)
    shapes: list[Shape] = []
    for tick, text in zip(ticks, labels_of(ticks, unit), strict=True):
        y = float(scale(tick))
        shapes.append(Path(points=((area.left, y), (area.right, y)), color="grid"))
        shapes.append(Text(x=area.left - 8, y=y + 4, text=text, anchor="end"))
    middle = (area.top + area.bottom) / 2
    shapes.append(Text(x=12, y=middle, text=label, anchor="middle", is_upright=True))
    return shapes


def labels_below(area: Frame, ticks: Sequence[Tick], label: str) -> list[Shape]:
    """Labels at some places, as many as there is room for, and what they are of."""
    shapes: list[Shape] = []
    last = float("-inf")
    for x, text in ticks:
        if x - last >= _LEAST_BETWEEN_PX:
            shapes.append(Text(x=x, y=area.bottom + 18, text=text, anchor="middle"))
            last = x
    middle = (area.left + area.right) / 2
    shapes.append(Text(x=middle, y=area.bottom + 38, text=label, anchor="middle"))
    return shapes


def labels_of(ticks: Sequence[float], unit: Unit) -> list[str]:
    """Numbers of an axis as text."""
    if unit == "ns":
        return time_labels(ticks)
    if unit == "loss":
        return [f"{tick:.3g}" for tick in ticks]
    return [format_count(int(tick)) for tick in ticks]
