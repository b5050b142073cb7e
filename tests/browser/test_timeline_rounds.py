"""The rounds of an all-reduce that is made of sends and receives, as a user sees them."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import served
from tests.browser.test_app import LANES, open_timeline, place_of
from tests.segments import ROUNDS, write_ring_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

US = 1_000
STRIPS = "Bokeh.documents[0].get_model_by_name('segments').data"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    with served(write_ring_recording(folder / "traces"), folder / "server.log") as url:
        yield url


def test_the_round_under_the_pointer_is_told_and_a_click_lists_all_of_them(open_page, ring):
    page = open_timeline(open_page, f"{ring}timeline?from={3_900 * US}&to={5_000 * US}")
    page.wait_for_function(f"{STRIPS}.left.length === 4")
    expect(page.locator(".legend")).to_contain_text("rounds of an all-reduce")
    stretch = f"document.getElementById('lanes').clientHeight / {LANES}.y_range.start"
    height_px = page.evaluate(f"({STRIPS}.top[0] + {STRIPS}.bottom[0]) / 2 * {stretch}")
    tip = page.locator("#tip")
    for phase, start_us, end_us in ROUNDS:
        page.mouse.move(*place_of(page, (start_us + end_us) / 2 * US, height_px))
        expect(tip).to_contain_text(phase)
        expect(tip).to_contain_text("to rank 1")
    page.mouse.click(*place_of(page, 4_500 * US, height_px))
    rows = page.locator("#selection table.rounds tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("reduce-scatter")


def test_a_recording_without_rounds_speaks_of_none(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    expect(page.locator(".legend")).not_to_contain_text("rounds")
