"""The page of a comparison: a waterfall that leads from the base to the new one, and the tables beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dashboards.pages.compare import Waterfall, build_waterfall
from dashboards.report.figures import load_bokeh_js
from dashboards.report.html import render_comparison_file
from overlapscope.compare.comparison import Comparison, compare
from overlapscope.compare.text import describe_outcomes
from overlapscope.report.compare import build_comparison_section
from overlapscope.trace.recording import read_trace
from tests.cli.test_compare import recorded
from tests.compare.jobs import side_of, trace_of


@pytest.fixture(scope="module")
def found() -> Comparison:
    """Forward takes longer, a bucket less time."""
    return compare(
        side_of(trace_of(path="base")),
        side_of(trace_of(path="new", seed=1, forward_ms=5, transfer_ms=(2, 2.5), noise=0.05)),
    )


def waterfall_of(found: Comparison) -> Waterfall:
    return build_waterfall(build_comparison_section(found, ["step"], 0.0).figures[0].table)


def test_each_fall_begins_where_the_one_before_ends_and_the_step_is_their_sum(found: Comparison) -> None:
    *falls, step = waterfall_of(found).falls
    assert [fall.block for fall in falls] == ["data_wait", "forward", "backward", "exposed"]
    now = start = step.left  # the step is longer, so its bar begins at 0
    for fall in falls:
        is_longer = found.changes[fall.block].mean.ns.value >= 0
        assert (fall.left if is_longer else fall.left + fall.width) == pytest.approx(now)
        now = fall.left + fall.width if is_longer else fall.left
    assert now == pytest.approx(start + step.width)


def test_intervals_are_drawn_about_the_ends_of_the_bars_and_within_the_axis(found: Comparison) -> None:
    waterfall = waterfall_of(found)
    for fall in waterfall.falls:
        assert 0 <= fall.low <= fall.high <= 100 + 1e-9
        ends = (fall.left, fall.left + fall.width)
        assert any(fall.low - 1e-9 <= end <= fall.high + 1e-9 for end in ends)
    assert {fall.label: fall.is_significant for fall in waterfall.falls}["forward"]
    assert "0" in [label for _, label in waterfall.ticks]
    assert 3 <= len(waterfall.ticks) <= 8


def test_a_comparison_without_any_difference_has_a_waterfall_too() -> None:
    sides = [side_of(trace_of(path=path, noise=0.0)) for path in ("base", "new")]
    falls = waterfall_of(compare(*sides)).falls
    assert {(fall.left, fall.width, fall.is_significant) for fall in falls} == {(50.0, 0.0, False)}


def test_the_page_says_what_the_command_says_and_asks_for_nothing_else(tmp_path: Path) -> None:
    folders = [recorded(tmp_path / name, seed, later_us) for name, seed, later_us in (("base", 0, 0), ("new", 1, 500))]
    found = compare(*(side_of(read_trace(folder)) for folder in folders))
    page = render_comparison_file(found, ["step", "exposed"], 0.0).replace(load_bokeh_js(), "")
    words = re.sub(r"<[^>]+>", "", page.partition("<body")[2]).replace("\N{NO-BREAK SPACE}", " ")
    for sentence in describe_outcomes(found, ["step", "exposed"], 0.0):
        assert sentence in words
    for table in build_comparison_section(found, ["step"], 0.0).tables:
        assert table.title in words
        for row in table.format_rows():
            assert all(cell.replace("\N{NO-BREAK SPACE}", " ") in words for cell in row)
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", page)
