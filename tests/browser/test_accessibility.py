"""What a page tells those who don't see it: landmarks, headings and names."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from dashboards.app import ROUTES
from dashboards.pages import overview
from tests.browser.conftest import OpenPage
from tests.browser.test_layout import ordered, ready

pytestmark = [pytest.mark.browser, pytest.mark.slow]

__all__ = ["ordered"]


@pytest.mark.parametrize(
    "route",
    [
        # A plot alone is one of a page's.
        pytest.param(route, marks=[pytest.mark.nightly] if route.startswith("/plots/") else [])
        for route, build in sorted(ROUTES.items())
        if route == "/" or build is not overview.build
    ],
)
def test_a_page_has_one_main_one_first_heading_and_names_for_its_plots(
    open_page: OpenPage, ordered: str, route: str
) -> None:
    page = ready(open_page(ordered + route.removeprefix("/")))
    expect(page.get_by_role("main")).to_have_count(1)
    first = page.get_by_role("heading", level=1)
    expect(first).to_have_count(1)
    assert first.inner_text().strip()
    assert page.locator("h1 kbd, h2 kbd, h3 kbd").count() == 0
    figures = page.evaluate("""[...document.querySelectorAll("[data-root-id]")].map((root) => {
        const named = root.closest("[role=img]")
        return [Boolean(named?.ariaLabel), Boolean(root.closest("main")), root.childElementCount]
    })""")
    assert figures
    assert all(is_named and is_in_main and children for is_named, is_in_main, children in figures)
    for control in page.locator("button, input, select").all():
        name = control.evaluate("(it) => it.ariaLabel || it.textContent || it.labels?.[0]?.textContent || it.title")
        assert name.strip()
