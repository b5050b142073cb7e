"""Pages with a range to zoom keep it in the address, as the timeline does."""

from __future__ import annotations

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.test_layout import ordered, ready

pytestmark = [pytest.mark.browser, pytest.mark.slow]

__all__ = ["ordered"]

FIGURES = {"stragglers": "heatmap", "order": "order", "buckets": "steps"}


@pytest.mark.parametrize(
    "route", ["order", *(pytest.param(page, marks=pytest.mark.nightly) for page in ("stragglers", "buckets"))]
)
def test_a_zoom_is_found_again_and_back_undoes_it(open_page: OpenPage, ordered: str, route: str) -> None:
    figure = f"Bokeh.documents[0].get_model_by_name('{FIGURES[route]}')"
    length = f"({figure}.x_range.end - {figure}.x_range.start)"
    page = ready(open_page(ordered + route))
    before = page.evaluate(length)
    assert "from=" not in page.url
    figure_box = page.locator(f"#{FIGURES[route]}")
    figure_box.scroll_into_view_if_needed()
    box = figure_box.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"{length} < {before} * 0.8")
    page.wait_for_function("location.search.includes('from=')")
    after = page.evaluate(length)
    again = ready(open_page(page.url))
    again.wait_for_function(f"Math.abs({length} / {after} - 1) < 0.05")
    page.go_back()
    page.wait_for_function(f"Math.abs({length} / {before} - 1) < 0.01")
