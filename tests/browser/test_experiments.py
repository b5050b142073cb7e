"""The page of experiments in a browser: charts are there in both themes, and axe has nothing serious to say."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage, served
from tests.browser.test_axe import find
from tests.dashboards.test_experiments_page import write_breakdown

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_chart_is_drawn_in_the_colors_of_the_theme(tmp_path: Path, open_page: OpenPage, theme: str):
    write_breakdown(tmp_path / "lab" / "breakdown")
    with served(tmp_path / "lab", tmp_path / "server.log") as url:
        page = open_page(f"{url}experiments", theme)
        chart = page.get_by_role("img", name="convnet, 2 ranks, gloo")
        expect(chart).to_be_visible()
        ink = page.evaluate("getComputedStyle(document.body).color")
        assert (
            chart.locator("text").filter(has_text="convnet, 2 ranks").evaluate("text => getComputedStyle(text).fill")
            == ink
        )
        page.get_by_text("7 trials, and how to repeat them").click()
        expect(page.get_by_text("overlapscope lab run breakdown")).to_be_visible()
        assert find(page, theme) == []
