"""The drawing of a figure: its charts below each other."""

from __future__ import annotations

from dashboards.charts.bars import draw_bars
from dashboards.charts.boxes import draw_boxes
from dashboards.charts.lines import draw_lines
from dashboards.charts.scene import Scene, below
from overlapscope.lab.experiments.charts import BoxPlotChart, Chart, FigureContent, StackedBarChart


def draw_chart(chart: Chart) -> Scene:
    """The drawing of one chart."""
    if isinstance(chart, StackedBarChart):
        return draw_bars(chart)
    return draw_boxes(chart) if isinstance(chart, BoxPlotChart) else draw_lines(chart)


def draw_figure(title: str, figure: FigureContent) -> Scene:
    """All charts of a figure, for a file."""
    return below(title, [draw_chart(chart) for chart in figure.charts])
