"""The timeline as a place to work: it opens where there is something to see, and what is chosen stays to be read."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_app import (
    BUCKET_1_OF_STEP_7,
    LANES,
    communication_middle_px,
    length,
    open_timeline,
    place_of,
    shown_range,
    wait_for_step,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MS = 1_000_000
OUTLINES = f"{LANES}.renderers.map((one) => one.data_source.data).find((data) => data.line_width)"


def choose_bucket_1_of_step_7(page: Page) -> None:
    page.mouse.click(*place_of(page, BUCKET_1_OF_STEP_7, communication_middle_px(page)))
    expect(page.locator("#selection")).to_be_visible()


def test_it_opens_on_a_typical_step_and_leads_to_others_by_its_strip_and_lists_its_keys(open_page, address):
    page = open_timeline(open_page, f"{address}timeline")
    assert length(page) < 12 * MS
    expect(page.locator("#status")).not_to_contain_text("shade")
    box = page.locator("#strip").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.85, box["y"] + box["height"] / 2)
    page.wait_for_function(f"{LANES}.x_range.start > 2e8")
    assert length(page) < 12 * MS
    window = page.locator("#window").bounding_box()
    assert window is not None
    assert window["x"] + window["width"] / 2 == pytest.approx(box["x"] + box["width"] * 0.85, abs=3)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_a_click_pins_outlines_and_copies_what_is_known_of_a_span_on_every_rank(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    choose_bucket_1_of_step_7(page)
    panel = page.locator("#selection")
    expect(panel.get_by_role("heading")).to_have_text("All-reduce · bucket 1 of step 7 on rank 0")
    expect(panel).to_contain_text("body.1.weight")
    rows = panel.locator("table").nth(1).locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("50.0 µs")
    way = panel.locator("table").nth(0)
    expect(way.locator("th[scope=col]")).to_have_count(7)
    expect(way.locator("tbody tr").nth(1)).to_have_text(
        re.compile(r"1\s*5\.000 ms\s*5\.000 ms\s*5\.050 ms\s*5\.050 ms\s*6\.550 ms\s*8\.410 ms")
    )
    page.mouse.move(5, 5)
    expect(panel).to_be_visible()
    page.wait_for_function(f"{OUTLINES}.left.length === 10")
    assert page.evaluate(f"Array.from({OUTLINES}.line_width).filter((width) => width > 2).length") == 1
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("All-reduce · bucket 1 of step 7 on rank 0\nrank\t0\n")
    assert "body.1.weight" in text


def test_what_was_clicked_stays_in_sight_beside_the_panel(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.set_viewport_size({"width": 1200, "height": 640})
    label = page.locator(".rank").last.locator(".lane", has_text="communication")
    height_px = page.locator(".rank").first.bounding_box()["height"]
    page.mouse.click(*place_of(page, BUCKET_1_OF_STEP_7, communication_middle_px(page) + height_px))
    expect(page.locator("#selection").get_by_role("heading")).to_contain_text("on rank 1")
    expect(page.locator("#ranks")).not_to_have_js_property("scrollTop", 0)
    panel_px, lane_px = page.locator("#selection").bounding_box(), label.bounding_box()
    assert lane_px["y"] + lane_px["height"] <= panel_px["y"]
    assert page.locator(".rank").first.bounding_box()["height"] == height_px, "a selection shrinks nothing"


def test_a_selection_is_cleared_by_escape_a_button_or_a_click_elsewhere(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    elsewhere = place_of(page, BUCKET_1_OF_STEP_7 + 3.5 * MS, communication_middle_px(page))
    for clear in (
        lambda: page.keyboard.press("Escape"),
        lambda: page.get_by_role("button", name="Close").click(),
        lambda: page.mouse.click(*elsewhere),
    ):
        choose_bucket_1_of_step_7(page)
        page.wait_for_function(f"{OUTLINES}.left.length > 0")
        clear()
        expect(page.locator("#selection")).to_be_hidden()
        page.wait_for_function(f"{OUTLINES}.left.length === 0")
        page.wait_for_timeout(500)  # two quick clicks at one place are a double click


FRAMES = "Bokeh.documents[0].get_model_by_name('frames').data.left.length"


def test_shift_and_drag_tabulate_an_area_rank_by_rank_and_back_and_escape_undo_it(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.wait_for_function("location.search.includes('from=')")
    before, panel = shown_range(page), page.locator("#selection")
    choose_bucket_1_of_step_7(page)
    page.wait_for_url("**span=0-communication-7-1**")
    y = communication_middle_px(page)
    first, last = (place_of(page, 7 * 10 * MS + ms * MS, y + down) for ms, down in ((2, 0), (8, 150)))
    page.keyboard.down("Shift")
    page.mouse.move(*first)
    page.mouse.down()
    page.mouse.move(*last, steps=4)
    expect(page.locator(".frame")).to_be_visible()
    page.mouse.up()
    page.keyboard.up("Shift")
    expect(panel.get_by_role("heading")).to_have_text(re.compile(r"(6\.00|5\.99|6\.01) ms on ranks 0, 1"))
    expect(page.locator(".frame")).to_be_hidden()
    page.wait_for_function(f"{FRAMES} === 1 && {OUTLINES}.left.length === 0")
    assert shown_range(page) == before, "it neither pans nor zooms"
    page.wait_for_function("/area=\\d+-\\d+$/.test(location.search)")
    ranks = panel.locator("tbody.ranks th")
    expect(ranks).to_have_text(["0", "1"])
    panel.get_by_role("button", name="rank").click()
    expect(ranks).to_have_text(["1", "0"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    rows = [line.split("\t") for line in page.evaluate("navigator.clipboard.readText()").split("\n")]
    assert [row[0] for row in rows[-2:]] == ["1", "0"]
    assert len({len(row) for row in rows[-4:]}) == 1, "columns stay below their headings"

    page.go_back()
    expect(panel.get_by_role("heading")).to_have_text("All-reduce · bucket 1 of step 7 on rank 0")
    page.wait_for_function(f"{FRAMES} === 0 && {OUTLINES}.left.length > 0")
    page.go_forward()
    expect(panel.get_by_role("heading")).to_contain_text("on ranks 0, 1")
    page.wait_for_function(f"{FRAMES} === 1 && {OUTLINES}.left.length === 0")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    page.wait_for_function(f"{FRAMES} === 0 && !location.search.includes('area=')")


def test_two_quick_clicks_at_two_places_are_two_clicks(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    before, y = shown_range(page), communication_middle_px(page)
    nowhere = place_of(page, BUCKET_1_OF_STEP_7 + 3.5 * MS, y)
    bucket = place_of(page, BUCKET_1_OF_STEP_7, y)
    page.mouse.click(*nowhere)
    page.mouse.click(*bucket)
    expect(page.locator("#selection").get_by_role("heading")).to_have_text("All-reduce · bucket 1 of step 7 on rank 0")
    assert shown_range(page) == before


def test_f_zooms_to_the_selection_and_back_undoes_it(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.wait_for_function("location.search.includes('from=')")
    before = shown_range(page)
    choose_bucket_1_of_step_7(page)
    page.keyboard.press("f")
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start < 3e6")
    start, end = shown_range(page)
    assert start < BUCKET_1_OF_STEP_7 < end
    page.wait_for_function(f"location.search.includes('from={round(start)}')")
    page.go_back()
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start > 8e6")
    assert shown_range(page) == pytest.approx(before, abs=2)
    page.go_forward()
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start < 3e6")
    expect(page.locator("#selection")).to_be_visible()


PRESS_F_ONCE_THE_PANEL_IS_SHOWN = """new MutationObserver((_, observer) => {
  if (document.getElementById("selection").hidden) return
  observer.disconnect()
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "f", bubbles: true}))
}).observe(document.getElementById("selection"), {attributes: true})"""


def test_keys_know_the_selection_as_soon_as_its_panel_is_shown(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.evaluate(PRESS_F_ONCE_THE_PANEL_IS_SHOWN)
    choose_bucket_1_of_step_7(page)
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start < 3e6")


def test_what_was_selected_before_is_selected_again(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    for _ in range(2):
        choose_bucket_1_of_step_7(page)
        page.wait_for_function(f"{OUTLINES}.left.length === 10")
        page.keyboard.press("Escape")
        expect(page.locator("#selection")).to_be_hidden()
        page.wait_for_function(f"{OUTLINES}.left.length === 0")


def test_the_selection_is_in_the_address_for_others_and_back_undoes_it(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.wait_for_function("location.search.includes('from=')")
    choose_bucket_1_of_step_7(page)
    page.wait_for_url("**span=0-communication-7-1**")
    other = open_timeline(open_page, page.url)
    expect(other.locator("#selection").get_by_role("heading")).to_have_text("All-reduce · bucket 1 of step 7 on rank 0")
    other.wait_for_function(f"{OUTLINES}.left.length === 10")
    page.go_back()
    expect(page.locator("#selection")).to_be_hidden()
    page.wait_for_function(f"{OUTLINES}.left.length === 0")
    page.go_forward()
    expect(page.locator("#selection")).to_be_visible()
    assert "span=0-communication-7-1" in page.url


def test_r_measures_between_two_clicks_or_along_a_drag_until_escape(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    before = shown_range(page)
    note, y = page.locator("#ruler-note"), communication_middle_px(page)
    start, end = 7 * 10 * MS + 6 * MS, 7 * 10 * MS + 8 * MS

    page.keyboard.press("r")
    expect(note).to_have_text("Click two points or drag.")
    page.mouse.click(*place_of(page, start, y))
    page.mouse.click(*place_of(page, end, y))
    expect(note).to_have_text(re.compile(r"(2\.00|1\.99|2\.01) ms on rank 0, .* of it exposed communication"))
    expect(page.locator("#selection")).to_be_hidden()

    page.keyboard.press("r")
    page.mouse.move(*place_of(page, start, y + 150))
    page.mouse.down()
    page.mouse.move(*place_of(page, end - MS, y + 150), steps=5)
    page.mouse.up()
    expect(note).to_have_text(re.compile(r"(1\.00|1\.01) ms|99\d µs on rank 1, .* exposed"))
    assert shown_range(page) == before

    page.keyboard.press("Escape")
    expect(note).to_be_empty()
    page.mouse.click(*place_of(page, BUCKET_1_OF_STEP_7, y))
    expect(page.locator("#selection")).to_be_visible()


def test_slash_finds_a_parameter_and_chooses_it(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.keyboard.press("/")
    page.keyboard.type("body.0")
    page.keyboard.press("Enter")
    expect(page.locator("#selection").get_by_role("heading")).to_contain_text("Gradient ready · bucket 2 of step")
    page.keyboard.press("/")
    page.locator("#search").fill("step 21")
    page.keyboard.press("Enter")
    wait_for_step(page, 21)
    page.locator("#search").fill("no such layer")
    page.keyboard.press("Enter")
    expect(page.locator("#search-note")).to_have_text("Nothing here is called 'no such layer'.")


def test_another_page_and_back_leads_to_the_same_place(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=12")
    page.keyboard.press("w")
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start < 9e6")
    before = shown_range(page)
    page.wait_for_function(f"location.search.includes('from={round(before[0])}')")
    page.get_by_role("link", name="Stragglers").click()
    page.wait_for_url("**/stragglers")
    page.get_by_role("link", name="Timeline").click()
    expect(page.locator("#status")).to_contain_text("in view")
    assert shown_range(page) == pytest.approx(before, abs=2)


def test_the_critical_path_is_drawn_when_it_is_wanted_and_stays_in_the_address(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=12")
    page.keyboard.press("c")
    points = "Bokeh.documents[0].get_model_by_name('path').data.x.length"
    page.wait_for_function(f"{points} > 4")
    assert "path=1" in page.url
    page.keyboard.press("c")
    page.wait_for_function(f"{points} === 0")
