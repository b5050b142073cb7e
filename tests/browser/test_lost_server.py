"""Pages whose server stops, and comes back."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import served
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("timeline?step=5", "#status"),
        pytest.param("stragglers?figure=wait", "#heatmap", marks=pytest.mark.nightly),
        pytest.param("", ".verdict", marks=pytest.mark.nightly),
    ],
)
def test_a_page_says_that_its_server_is_gone_and_comes_back_with_its_view(
    browser: Browser, tmp_path: Path, address: str, place: str
) -> None:
    folder = write_recording(tmp_path / "traces", steps=12)
    page = browser.new_page()
    try:
        with served(folder, tmp_path / "first.log") as url:
            page.goto(url + address)
            page.wait_for_function("Bokeh.documents[0]?.is_idle")
            expect(page.locator("#lost")).to_be_hidden()
            if address.startswith("timeline"):
                page.keyboard.press("d")
                page.wait_for_function("new URLSearchParams(location.search).has('from')")
            before = page.url
            page.evaluate("window.isTheOldPage = true")
        lost = page.get_by_role("alert")
        expect(lost).to_contain_text("The server no longer answers.")
        page.wait_for_timeout(2_000)  # the first attempts fail
        expect(lost).to_be_visible()
        with served(folder, tmp_path / "second.log", "--port", str(urlsplit(url).port)):
            page.wait_for_function("!window.isTheOldPage")
            page.wait_for_function("Bokeh.documents[0]?.is_idle")
            expect(page.locator("#lost")).to_be_hidden()
            expect(page.locator(place)).to_be_visible()
            assert page.url == before
            # It answers again: what is asked of it now comes.
            if address.startswith("timeline"):
                page.keyboard.press("]")
                page.wait_for_function(f"location.href !== {before!r}")
    finally:
        page.close()
