"""Figures as pictures: what is drawn where, and that files are what they say."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from pathlib import Path as FilePath
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dashboards import theme
from dashboards.charts.drawing import draw_chart, draw_figure
from dashboards.charts.files import write_pictures
from dashboards.charts.png import dashes, png_file
from dashboards.charts.scene import Dot, Path, Rectangle, Scene, Text
from dashboards.charts.svg import MARGIN_PX, svg_file, svg_for_page
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.lab.experiments.charts import (
    BoxPlotChart,
    FigureContent,
    LineChart,
    LineSeries,
    StackedBar,
    StackedBarChart,
    compute_box,
)

MS = 1e6
UNKNOWN = Interval(value=100 * MS, low=math.nan, high=math.nan)
BARS = StackedBarChart(
    title="convnet",
    bars=(
        StackedBar(label="ring", parts_ns={"forward": 30 * MS, "exposed": 70 * MS}, step_ns=UNKNOWN),
        StackedBar(
            label="<tree>", parts_ns={"forward": 50 * MS}, step_ns=Interval(value=50 * MS, low=40 * MS, high=60 * MS)
        ),
    ),
)
BOXES = BoxPlotChart(
    title="convnet", x_label="MB", boxes=(compute_box("0", [10 * MS] * 4), compute_box("25", [5 * MS, 20 * MS]))
)
LINES = LineChart(
    title="convnet",
    x_label="ranks",
    y_label="step",
    is_log=True,
    lines=(
        LineSeries(
            label="measured", x=(1, 2, 4), y=(1 * MS, 2 * MS, 3 * MS), low=(1, 2, math.nan), high=(1, 2, math.nan)
        ),
        LineSeries(label="predicted", x=(4, 8), y=(3 * MS, 4 * MS), style="predicted", color=1),
    ),
)
FIGURE = FigureContent(charts=(BARS, BOXES, LINES), here=())


def of_kind(scene: Scene, kind: type) -> list:
    return [shape for shape in scene.shapes if isinstance(shape, kind)]


def test_the_parts_of_a_bar_follow_each_other_and_are_as_long_as_their_times():
    parts = [each for each in of_kind(draw_chart(BARS), Rectangle) if each.fill.startswith("block-") and each.tip]
    forward, exposed, other = parts
    assert forward.x + forward.width == pytest.approx(exposed.x)
    assert exposed.width / forward.width == pytest.approx(70 / 30)
    assert other.width / forward.width == pytest.approx(50 / 30)
    assert exposed.tip == "ring: exposed communication 70.0 ms of 100 ms"


def test_an_interval_is_drawn_if_it_is_known():
    lines = [each for each in of_kind(draw_chart(BARS), Path) if each.color == "ink"]
    assert len(lines) == 3  # of one bar: the line and its two ends


@pytest.mark.parametrize("chart", [BARS, BOXES, LINES], ids=["bars", "boxes", "lines"])
def test_all_of_a_chart_is_inside_its_picture(chart):
    scene = draw_chart(chart)
    for shape in scene.shapes:
        points = shape.points if isinstance(shape, Path) else [(shape.x, shape.y)]
        assert all(0 <= x <= scene.width and 0 <= y <= scene.height for x, y in points), shape


def test_a_point_says_its_numbers():
    tips = {dot.tip for dot in of_kind(draw_chart(LINES), Dot)}
    assert {"measured: 1, 1 ms", "measured: 4, 3 ms", "predicted: 8, 4 ms"} <= tips


def test_predictions_are_dashed_and_hollow():
    scene = draw_chart(LINES)
    (line,) = [
        each for each in of_kind(scene, Path) if each.is_dashed and len(each.points) == 2 and each.points[0][1] != 31.0
    ]
    hollow = [(dot.x, dot.y) for dot in of_kind(scene, Dot) if dot.fill == "surface"]
    assert hollow == list(line.points)


def test_all_colors_are_the_themes():
    known = theme.css_variables("light")
    for shape in draw_figure("all", FIGURE).shapes:
        names = [getattr(shape, name, "") for name in ("fill", "edge", "color")]
        assert all(f"--{name}" in known for name in names if name)


def test_the_svg_file_is_one_and_escapes_what_it_is_given():
    root = ElementTree.fromstring(svg_file(draw_figure("a & b", FIGURE)))
    assert root.get("aria-label") == "a & b"
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("<tree>") == 1


def test_in_a_page_colors_are_those_of_its_theme():
    markup = svg_for_page(draw_chart(BARS))
    assert "var(--block-exposed)" in markup
    assert "#" not in markup


def test_the_png_file_shows_the_same_colors_at_the_same_places():
    scene = draw_chart(BARS)
    image = Image.open(io.BytesIO(png_file(scene))).convert("RGB")
    assert image.size == (2 * (scene.width + 2 * MARGIN_PX), 2 * (scene.height + 2 * MARGIN_PX))
    for part in [each for each in of_kind(scene, Rectangle) if each.fill]:
        place = [round(2 * (at + MARGIN_PX)) for at in (part.x + part.width / 2, part.y + 2)]
        wanted = theme.css_variables("light")[f"--{part.fill}"]
        seen = image.getpixel((place[0], place[1]))
        assert np.abs(np.array(seen) - [int(wanted[at : at + 2], 16) for at in (1, 3, 5)]).max() <= 6


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=2, max_size=8))
def test_dashes_cover_as_much_of_a_line_as_they_should(points):
    length = sum(math.dist(*ends) for ends in pairwise(points))
    drawn = sum(math.dist(*ends) for ends in dashes(tuple(points)))
    whole, rest = divmod(length, 10.0)
    assert drawn == pytest.approx(6.0 * whole + min(rest, 6.0), abs=1e-3)


def test_an_earlier_picture_is_not_replaced(tmp_path: FilePath):
    svg, png = write_pictures(tmp_path / "new", "breakdown", "title", FIGURE)
    assert svg.read_text().startswith("<svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OverlapScopeError, match=r"breakdown.svg: already exists"):
        write_pictures(tmp_path / "new", "breakdown", "title", FIGURE)


def test_a_chart_without_anything_is_drawn_too():
    empty = (
        StackedBarChart(title="", bars=()),
        BoxPlotChart(title="", x_label="", boxes=()),
        LineChart(title="", x_label="", y_label="", lines=()),
    )
    for chart in empty:
        assert png_file(draw_chart(chart))
        assert of_kind(draw_chart(chart), Text)
