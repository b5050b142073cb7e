"""Steps below each other, divided as the account divides them."""

from __future__ import annotations

from dashboards.charts.axes import RIGHT_PX, TITLE_PX, WIDTH_PX, scene_of
from dashboards.charts.frame import nice_ticks, time_labels
from dashboards.charts.scene import Path, Rectangle, Scene, Shape, Text
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.labels import BLOCK_LABELS
from overlapscope.lab.experiments.charts import StackedBar, StackedBarChart, has_interval
from overlapscope.text import format_interval_ns, format_ns

_BAR_PX, _EVERY_PX = 18.0, 28.0
_LETTER_PX = 7.0
_ROOM_FOR_TIMES_PX = 74.0
_LEGEND_LINE_PX = 20.0


def draw_bars(chart: StackedBarChart) -> Scene:
    """A bar for each setting, from the left."""
    left = 16 + _LETTER_PX * max((len(bar.label) for bar in chart.bars), default=0)
    right = WIDTH_PX - RIGHT_PX - _ROOM_FOR_TIMES_PX
    longest_ns = max((_end_of(bar) for bar in chart.bars), default=1.0) or 1.0
    px = (right - left) / longest_ns
    bottom = TITLE_PX + _EVERY_PX * len(chart.bars)
    shapes: list[Shape] = []
    ticks = nice_ticks(0.0, longest_ns, 5)
    for tick, text in zip(ticks, time_labels(ticks), strict=True):
        x = left + tick * px
        shapes.append(Path(points=((x, TITLE_PX), (x, bottom)), color="grid"))
        shapes.append(Text(x=x, y=bottom + 16, text=text, anchor="middle"))
    for place, bar in enumerate(chart.bars):
        shapes += _bar(bar, TITLE_PX + _EVERY_PX * place + (_EVERY_PX - _BAR_PX) / 2, left, px)
    present = [name for name in BLOCKS if any(name in bar.parts_ns for bar in chart.bars)]
    legend, height = _legend(present, bottom + 40)
    return scene_of(chart.title, [*shapes, *legend], height)


def _bar(bar: StackedBar, y: float, left: float, px: float) -> list[Shape]:
    shapes: list[Shape] = [Text(x=left - 10, y=y + 13, text=bar.label, color="ink", anchor="end")]
    x, middle = left, y + _BAR_PX / 2
    for name in BLOCKS:
        ns = bar.parts_ns.get(name, 0.0)
        if ns > 0:
            tip = f"{bar.label}: {BLOCK_LABELS[name]} {format_ns(ns)} of {format_ns(bar.step_ns.value)}"
            fill = f"block-{name.replace('_', '-')}"
            shapes.append(Rectangle(x=x, y=y, width=ns * px, height=_BAR_PX, fill=fill, tip=tip))
            x += ns * px
    if has_interval(bar.step_ns):
        low, high = left + bar.step_ns.low * px, left + bar.step_ns.high * px
        shapes.append(Path(points=((low, middle), (high, middle)), color="ink", width=1.5))
        shapes += [Path(points=((end, middle - 4), (end, middle + 4)), color="ink", width=1.5) for end in (low, high)]
    text = format_ns(bar.step_ns.value)
    shapes.append(Text(x=left + _end_of(bar) * px + 8, y=y + 13, text=text, color="ink"))
    hint = (
        f"{bar.label}: {text}, {format_interval_ns(bar.step_ns)}"
        if has_interval(bar.step_ns)
        else f"{bar.label}: {text}"
    )
    return [*shapes, Rectangle(x=0, y=y, width=left - 4, height=_BAR_PX, fill="", tip=hint)]


def _end_of(bar: StackedBar) -> float:
    return max(bar.step_ns.value, bar.step_ns.high) if has_interval(bar.step_ns) else bar.step_ns.value


def _legend(names: list[str], y: float) -> tuple[list[Shape], float]:
    """Swatches with names, in as many lines as they need, and where they end."""
    shapes: list[Shape] = []
    x = 0.0
    for name in names:
        width = 26 + _LETTER_PX * len(BLOCK_LABELS[name])
        if x and x + width > WIDTH_PX:
            x, y = 0.0, y + _LEGEND_LINE_PX
        fill = f"block-{name.replace('_', '-')}"
        shapes.append(Rectangle(x=x, y=y - 10, width=11, height=11, fill=fill))
        shapes.append(Text(x=x + 16, y=y, text=BLOCK_LABELS[name]))
        x += width
    return shapes, y + 10
