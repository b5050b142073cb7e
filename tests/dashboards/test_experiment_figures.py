"""Figures of experiments: what is drawn where, and that files are what they say."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from PIL import Image

from dashboards import theme
from dashboards.experiment_figures import draw, draw_picture, svg_for_page, write_pictures
from dashboards.pages.experiments import build_experiment_section, find_experiments
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.lab.experiments.charts import (
    BoxPlotChart,
    Chart,
    FigureContent,
    LineChart,
    LineSeries,
    StackedBar,
    StackedBarChart,
    compute_box,
)
from tests.dashboards.test_experiments_page import write_breakdown

MS = 1e6
COLORS = {name.removeprefix("--"): color for name, color in theme.css_variables("light").items()}
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


def drawn(chart: Chart) -> tuple[Any, dict[str, str]]:
    """The axes of a chart, and the tips of what is on it."""
    picture, tips = draw("", [chart], COLORS)
    return picture.axes[0], tips


def test_the_parts_of_a_bar_follow_each_other_and_are_as_long_as_their_times():
    axes, tips = drawn(BARS)
    forward, exposed, other = axes.patches
    assert forward.get_x() + forward.get_width() == exposed.get_x()
    assert [part.get_width() for part in (forward, exposed, other)] == [30 * MS, 70 * MS, 50 * MS]
    assert to_hex(exposed.get_facecolor()) == COLORS["block-exposed"]
    assert tips[exposed.get_gid()] == "ring: exposed communication 70.0 ms of 100 ms"


def test_an_interval_is_drawn_if_it_is_known():
    axes, _ = drawn(BARS)
    (interval,) = axes.collections
    assert interval.get_segments()[0].tolist() == [[40 * MS, 1], [60 * MS, 1]]
    axes, _ = drawn(LINES)
    (intervals,) = axes.collections
    assert [segment[:, 1].tolist() for segment in intervals.get_segments()] == [[1, 1], [2, 2]]


def test_a_box_is_drawn_from_quartile_to_quartile():
    axes, tips = drawn(BOXES)
    _, box = axes.patches
    heights = box.get_path().vertices[:4, 1]
    assert (min(heights), max(heights)) == (8.75 * MS, 16.25 * MS)
    assert tips[box.get_gid()] == "25: median 12.5 ms, quartiles 8.75 ms and 16.2 ms, of 2 steps"


def test_a_point_says_its_numbers():
    _, tips = drawn(LINES)
    assert {"measured: 1, 1.00 ms", "measured: 4, 3.00 ms", "predicted: 8, 4.00 ms"} <= set(tips.values())


def test_an_axis_has_round_numbers_without_the_zeros_of_a_measurement():
    axes, _ = drawn(LINES)
    assert [axes.yaxis.get_major_formatter()(value, None) for value in (0, 50 * MS, 1200 * MS)] == [
        "0",
        "50 ms",
        "1.2 s",
    ]


def test_predictions_are_dashed_and_hollow():
    axes, tips = drawn(LINES)
    (line,) = [each for each in axes.lines if each.get_linestyle() == "--"]
    assert line.get_xydata().tolist() == [[4, 3 * MS], [8, 4 * MS]]
    faces = {tips[dot.get_gid()]: dot.get_markerfacecolor() for dot in axes.lines if dot.get_gid()}
    assert faces["predicted: 8, 4.00 ms"] == COLORS["surface"]
    assert faces["measured: 4, 3.00 ms"] == axes.lines[0].get_color() != COLORS["surface"]


def test_the_axis_is_not_flattened_by_a_few_high_values_before_smoothing():
    noisy = LineSeries(
        label="", x=tuple(range(200)), y=(1.0,) * 200, unsmoothed_y=(*(2.0,) * 199, 500.0), style="smooth"
    )
    axes, _ = drawn(LineChart(title="", x_label="step", y_label="loss", y_unit="loss", lines=(noisy,)))
    assert axes.get_ylim() == (0, pytest.approx(2.1))


def test_the_svg_file_is_one_and_escapes_what_it_is_given():
    root = ElementTree.fromstring(draw_picture("a & b", FIGURE, "svg"))
    assert root.get("aria-label") == "a & b"
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("<tree>") == 1
    tips = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "<tree>: forward 50.0 ms of 50.0 ms" in tips


@pytest.mark.parametrize("chart", FIGURE.charts, ids=["bars", "boxes", "lines"])
def test_in_a_page_all_colors_are_those_of_its_theme(chart: Chart):
    root = ElementTree.fromstring(svg_for_page(chart))
    said = [each.get("style", "") for each in root.iter()]
    colors = [
        part.split(":")[1].strip()
        for style in said
        for part in style.split(";")
        if part.strip()[:4] in ("fill", "stro")
    ]
    assert "#" not in " ".join(colors)
    assert {color for color in colors if color.startswith("var")} <= {f"var(--{name})" for name in COLORS}


def test_the_png_file_shows_the_colors_of_the_light_theme():
    image = Image.open(io.BytesIO(draw_picture("title", FIGURE, "png"))).convert("RGB")
    colors = image.getcolors(maxcolors=1 << 24)
    assert colors is not None
    seen = {f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in colors}  # type: ignore[misc]
    assert {COLORS["surface"], COLORS["block-forward"], COLORS["block-exposed"]} <= seen


def test_an_earlier_picture_is_not_replaced(tmp_path: Path):
    svg, png = write_pictures(tmp_path / "new", "breakdown", "title", FIGURE)
    assert "<svg" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OverlapScopeError, match=r"breakdown.svg: already exists"):
        write_pictures(tmp_path / "new", "breakdown", "title", FIGURE)


def test_a_chart_without_anything_is_drawn_too():
    empty: tuple[Chart, ...] = (
        StackedBarChart(title="", bars=()),
        BoxPlotChart(title="", x_label="", boxes=()),
        LineChart(title="", x_label="", y_label="", lines=()),
    )
    for chart in empty:
        assert svg_for_page(chart).startswith("<svg")
    assert draw_picture("nothing", FigureContent(charts=(), here=()), "png").startswith(b"\x89PNG")


def test_without_matplotlib_the_page_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_breakdown(tmp_path / "breakdown")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (found,) = find_experiments([tmp_path])
    section = build_experiment_section(found, {})
    assert section.charts == ()
    assert "pip install 'overlapscope[lab]'" in section.problem
    assert section.here
    assert section.trials
