"""The timeline of more ranks than fit, expanded and collapsed, and the ideal over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import served
from tests.browser.test_app import LANES, length, open_timeline, shown_range, wait_for_step
from tests.synthetic import write_recording, write_straggling_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OUTLINES = "Bokeh.documents[0].get_model_by_name('outlines').data.left.length"
"""How many spans of the ideal are drawn, in the page's script."""
SPANS = f"{LANES}.renderers.map((one) => one.data_source.data).find((data) => data.pattern).lane"
"""Lanes of the spans drawn."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A recording of 20 ranks and 8 steps."""
    folder = tmp_path_factory.mktemp("many")
    with served(write_recording(folder / "traces", ranks=20, steps=8), folder / "server.log") as url:
        yield url


def shown_ranks(page: Page) -> list[int]:
    return [int(text.removeprefix("rank ")) for text in page.locator(".rank .number").all_text_contents()]


def test_all_ranks_are_there_to_scroll_and_one_is_expanded_by_key_or_click(open_page, many):
    page = open_timeline(open_page, f"{many}timeline?step=5")
    page.set_viewport_size({"width": 1200, "height": 480})
    assert shown_ranks(page) == list(range(20))
    expect(page.locator(".rank .lane")).to_have_count(0)
    lanes = page.locator("#lanes").bounding_box()
    page.mouse.move(lanes["x"] + 300, lanes["y"] + 8)
    page.keyboard.press("e")
    expect(page.get_by_role("button", name="rank 0", exact=True)).to_have_attribute("aria-expanded", "true")
    page.wait_for_function(f"Array.from({SPANS}).some((lane) => lane === 3)")
    assert {lane for lane in page.evaluate(f"Array.from({SPANS})") if lane % 4} == {1, 2, 3}
    page.wait_for_url("**expanded=0**")
    page.get_by_role("button", name="rank 0", exact=True).click()
    expect(page.locator(".rank .lane")).to_have_count(0)
    page.go_back()
    expect(page.locator(".rank .lane")).to_have_count(4)
    wait_for_step(page, 5)
    page.keyboard.press("Shift+E")
    expect(page.locator(".rank .lane")).to_have_count(0)
    page.locator("#expand-all").click()
    expect(page.locator(".rank .lane")).to_have_count(80)
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    page.wait_for_function(f"Array.from({SPANS}).every((lane) => lane > 3)")
    middle, top = page.locator("#ranks").bounding_box(), page.evaluate(f"{LANES}.y_range.end")
    assert page.evaluate("document.getElementById('ranks').scrollTop") == pytest.approx(top, abs=1)
    page.mouse.move(middle["x"] + 400, middle["y"] + 50)
    page.mouse.down()
    page.mouse.move(middle["x"] + 400, middle["y"] + 90)
    page.mouse.up()
    assert page.evaluate(f"{LANES}.y_range.end") == pytest.approx(top - 40, abs=1)


def test_choosing_ranks_keeps_step_and_view(open_page, many):
    page = open_timeline(open_page, f"{many}timeline?step=5&rank=2")
    wait_for_step(page, 5)
    page.keyboard.press("w")
    before = shown_range(page)
    page.locator("#chosen-ranks").fill("17, 3-4")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.rank').length === 3")
    expect(page.locator("#status")).to_contain_text("in view")
    assert shown_ranks(page) == [17, 3, 4]
    page.wait_for_function(f"Array.from({SPANS}).every((lane) => lane < 12)")
    assert shown_range(page) == pytest.approx(before, abs=2)
    wait_for_step(page, 5)


def test_a_choice_that_is_none_is_refused(open_page, many):
    page = open_timeline(open_page, f"{many}timeline")
    page.locator("#chosen-ranks").fill("first ten")
    page.keyboard.press("Enter")
    expect(page.locator("#chosen-ranks:invalid")).to_have_count(1)
    assert shown_ranks(page) == list(range(20))
    assert "ranks=" not in page.url


def test_nonsense_in_the_address_is_ignored(open_page, many):
    page = open_timeline(open_page, f"{many}timeline?ranks=x,-1,99,%00&rank=<b>&ideal=yes&step=no")
    assert shown_ranks(page) == list(range(20))
    expect(page.locator(".tools")).to_contain_text("there is no rank 99")
    expect(page.locator("#ideal")).not_to_be_checked()


def test_a_link_to_a_rank_at_a_step_shows_that_rank_first_and_marks_it(open_page, many):
    page = open_timeline(open_page, f"{many}timeline?step=6&rank=18")
    assert shown_ranks(page) == [18, *range(18), 19]
    expect(page.locator(".rank.marked .number")).to_have_text("rank 18")
    expect(page.locator(".rank.expanded")).to_have_count(1)
    wait_for_step(page, 6)
    assert length(page) < 13_000_000


def test_ranks_are_sorted_by_lateness_pinned_and_folded_by_host_and_back_undoes_each(open_page, tmp_path):
    folder = write_straggling_recording(
        tmp_path / "traces", late_us=lambda rank, step: 300 * (rank == (5 if step == 6 else 9)), ranks=12, steps=8
    )
    with served(folder, tmp_path / "server.log") as url:
        page = open_timeline(open_page, f"{url}timeline?step=6")

        def wait_for_ranks(*ranks: int) -> None:
            for place, rank in enumerate(ranks):
                expect(page.locator(".rank .number").nth(place)).to_have_text(f"rank {rank}")
            expect(page.locator("#status")).to_contain_text("in view")

        page.get_by_label("Order of ranks").select_option("lateness")
        wait_for_ranks(5)
        expect(page.locator(".rank .late").first).to_have_text("300 µs late")
        page.keyboard.press("]")
        page.get_by_role("button", name="Sort by step 7").click()
        wait_for_ranks(9)
        page.get_by_role("button", name="Keep rank 11 on top").click()
        wait_for_ranks(11)
        expect(page.get_by_role("button", name="Keep rank 11 on top")).to_have_attribute("aria-pressed", "true")
        page.get_by_label("Order of ranks").select_option("host")
        wait_for_ranks(11, 9, 0, 4)
        page.keyboard.press("]")  # there is no later step: that must not become an entry of its own after the next one
        page.get_by_role("button", name="node1").click()
        wait_for_ranks(11, 9, 0, 4, 5, 6, 7)
        expect(page.get_by_role("button", name="node1")).to_have_attribute("aria-expanded", "true")
        page.wait_for_timeout(400)  # until the address has been written
        page.go_back()
        expect(page.locator(".rank")).to_have_count(4)
        wait_for_step(page, 7)


@pytest.mark.nightly
def test_the_ideal_is_drawn_and_taken_away_and_remembered(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    expect(page.locator(".legend .ideal")).to_be_hidden()
    page.keyboard.press("i")
    page.wait_for_function(f"{OUTLINES} > 0")
    expect(page.locator(".legend .ideal")).to_be_visible()
    expect(page.locator("#ideal-hint")).to_be_empty()
    page.wait_for_url("**ideal=1**")
    again = open_timeline(open_page, page.url)
    again.wait_for_function(f"{OUTLINES} > 0")
    again.locator("#ideal").uncheck()
    again.wait_for_function(f"{OUTLINES} === 0")
    assert "ideal" not in again.url


def test_the_ideal_of_too_many_steps_waits_for_zooming_in(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?ideal=1")
    page.keyboard.press("0")
    expect(page.locator("#ideal-hint")).to_contain_text("zoom in to 20 steps or fewer")
    page.locator("#step").fill("12")
    page.keyboard.press("Enter")
    page.wait_for_function(f"{OUTLINES} > 0")
    expect(page.locator("#ideal-hint")).to_be_empty()


def test_a_click_on_the_toggle_leaves_the_keys_to_the_timeline(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.get_by_label("Ideal").check()
    before = length(page)
    page.keyboard.press("w")
    assert length(page) < before
