"""The app as people meet it: a recording, a server, a browser."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import served
from tests.synthetic import write_recording

pytestmark = pytest.mark.browser

BUCKET_1_OF_STEP_7 = 7 * 10_000_000 + 5_500_000
"""A moment at which rank 0 reduces bucket 1, in nanoseconds from the begin of the recording."""


LANES = "Bokeh.documents[0].get_model_by_name('lanes')"
"""The figure of the lanes, in the page's script."""


def shown_range(page: Page) -> tuple[float, float]:
    start, end = page.evaluate(f"[{LANES}.x_range.start, {LANES}.x_range.end]")
    return start, end


def length(page: Page) -> float:
    start, end = shown_range(page)
    return end - start


def open_timeline(open_page, url: str, **options: str) -> Page:
    page = open_page(url, **options)
    expect(page.locator("#status")).to_contain_text("in view")
    return page


def wait_for_step(page: Page, step: int) -> None:
    expect(page.locator("#step")).to_have_value(str(step))
    page.wait_for_function(f"new URLSearchParams(location.search).get('step') === '{step}'")


def place_of(page: Page, moment_ns: float, lane_middle_px: float) -> tuple[float, float]:
    box = page.locator("#lanes").bounding_box()
    assert box is not None
    start, end = shown_range(page)
    width = page.evaluate(f"{LANES}.inner_width")
    return box["x"] + (moment_ns - start) / (end - start) * width, box["y"] + lane_middle_px


def communication_middle_px(page: Page) -> float:
    label = page.locator(".rank").first.locator(".lane", has_text="communication").bounding_box()
    lanes = page.locator("#lanes").bounding_box()
    assert label is not None
    assert lanes is not None
    return label["y"] + label["height"] / 2 - lanes["y"]


def test_the_overview_answers_where_the_step_time_goes_and_the_header_leads_from_page_to_page(open_page, address):
    page = open_page(address)
    expect(page.locator(".verdict")).to_contain_text("is hidden")
    expect(page.locator(".headlines")).to_contain_text("10.0 ms")
    ranks = page.locator("section", has=page.get_by_role("heading", name="Ranks")).locator("tbody tr")
    expect(ranks).to_have_count(2)
    page.wait_for_function("Bokeh.documents[0]?.is_idle")
    page.get_by_role("link", name="Timeline").click()
    expect(page.locator("#status")).to_contain_text("spans in view")
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".verdict")).to_be_visible()


def test_a_block_leads_to_the_step_in_which_it_is_longest(open_page, address):
    page = open_page(address)
    page.locator(".breakdown-bar a", has_text="backward").first.click()
    page.wait_for_url("**/timeline?step=*&rank=*")
    expect(page.locator("#status")).to_contain_text("in view")


@pytest.mark.slow
def test_pointing_at_a_trend_reads_a_step_and_a_click_opens_it(open_page, address):
    page = open_page(address)
    page.wait_for_function("Bokeh.documents[0]?.is_idle")
    trend = page.locator(".trend").first
    trend.scroll_into_view_if_needed()
    box = trend.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(trend.locator("[data-readout]")).to_contain_text("step 1")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url("**/timeline?step=*")
    expect(page.locator("#status")).to_contain_text("in view")
    assert length(page) < 12_000_000


def test_wheel_keys_and_dragging_zoom_and_pan_and_a_double_click_shows_all(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    before = length(page)
    x, y = place_of(page, BUCKET_1_OF_STEP_7, 60)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -600)
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start < {before}")
    start, end = shown_range(page)
    assert start < BUCKET_1_OF_STEP_7 < end

    page.keyboard.press("0")
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start > 3e8")
    whole = shown_range(page)
    page.keyboard.press("w")
    page.keyboard.press("w")
    zoomed = shown_range(page)
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]
    page.keyboard.press("d")
    assert shown_range(page)[0] > zoomed[0]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("s")
    assert length(page) > zoomed[1] - zoomed[0]
    page.keyboard.press("0")
    assert shown_range(page) == whole

    page.keyboard.press("w")
    page.keyboard.press("w")
    before = shown_range(page)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 150, y, steps=5)
    page.mouse.up()
    moved = shown_range(page)
    assert moved[0] > before[0]
    assert moved[1] - moved[0] == pytest.approx(before[1] - before[0])
    page.mouse.dblclick(x, y)
    page.wait_for_function(f"{LANES}.x_range.end - {LANES}.x_range.start > 3e8")


def test_pointing_at_a_bucket_shows_its_parameter_and_covers_no_span_in_a_window_of_any_size(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=7")
    page.mouse.move(*place_of(page, BUCKET_1_OF_STEP_7, communication_middle_px(page)))
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("All-reduce · bucket 1")
    expect(tip).to_contain_text("body.1.weight")
    expect(tip).to_contain_text("16 MB of float32")
    expect(tip).to_contain_text("launched at")
    box, lanes = (page.locator(name).bounding_box() for name in ("#tip", "#lanes"))
    assert box is not None
    assert lanes is not None
    assert box["y"] >= lanes["y"] + lanes["height"] or box["y"] + box["height"] <= lanes["y"]
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    page.set_viewport_size({"width": 800, "height": 600})
    page.wait_for_function("Bokeh.documents[0].get_model_by_name('view').data.width_px[0] < 700")
    page.mouse.move(*place_of(page, BUCKET_1_OF_STEP_7, communication_middle_px(page)))
    expect(tip).to_contain_text("bucket 1")


def test_the_step_picker_goes_to_a_step_and_to_its_neighbors(open_page, address):
    page = open_timeline(open_page, f"{address}timeline")
    page.locator("#step").fill("12")
    page.keyboard.press("Enter")
    wait_for_step(page, 12)
    assert length(page) < 12_000_000
    page.get_by_role("button", name="Next step").click()
    wait_for_step(page, 13)
    page.keyboard.press("[")
    wait_for_step(page, 12)


@pytest.mark.slow
def test_the_address_restores_the_view_and_floods_no_history(open_page, address):
    page = open_timeline(open_page, f"{address}timeline?step=5")
    entries = page.evaluate("history.length")
    for _ in range(8):
        page.keyboard.press("d")
    start, end = shown_range(page)
    page.wait_for_function(f"new URLSearchParams(location.search).get('from') === '{round(start)}'")
    assert page.evaluate("history.length") == entries
    page.keyboard.press("w")
    start, end = shown_range(page)
    page.wait_for_function(f"new URLSearchParams(location.search).get('from') === '{round(start)}'")
    assert page.evaluate("history.length") == entries + 1, "going back undoes a zoom"
    query = parse_qs(urlsplit(page.url).query)
    assert query["to"] == [str(round(end))]
    again = open_timeline(open_page, page.url)
    assert shown_range(again) == pytest.approx((start, end), abs=2)


@pytest.mark.slow
def test_the_theme_follows_the_system_until_it_is_chosen_and_is_kept_then(open_page, address):
    page = open_timeline(open_page, f"{address}timeline", theme="dark")
    html = page.locator("html")
    expect(html).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(html).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Switch between light and dark").click()
    expect(html).to_have_attribute("data-theme", "dark")
    assert "theme=dark" in page.url
    page.goto(address)
    expect(html).to_have_attribute("data-theme", "dark")


def test_a_plot_alone_has_its_own_address(open_page, address):
    page = open_timeline(open_page, f"{address}plots/timeline")
    expect(page.locator("header")).to_have_count(0)
    page.goto(f"{address}plots/overlap_ratio")
    expect(page.locator(".trend")).to_be_visible()
    page.wait_for_function("Bokeh.documents[0]?.is_idle")


def test_a_folder_without_a_recording_gives_a_page_that_says_so_until_there_is_one(open_page, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    with served(folder, tmp_path / "server.log") as url:
        page = open_page(url)
        expect(page.get_by_role("heading")).to_have_text("There is nothing to show yet")
        expect(page.locator("main")).to_contain_text("overlapscope record")
        assert "empty" in (tmp_path / "server.log").read_text()
        write_recording(folder, ranks=1)
        page.reload()
        expect(page.locator(".verdict")).to_be_visible()


@pytest.mark.slow
def test_a_reload_shows_the_steps_recorded_since(open_page, tmp_path):
    folder = tmp_path / "traces"
    write_recording(folder, ranks=1, steps=4)
    with served(folder, tmp_path / "server.log") as url:
        page = open_page(url)
        expect(page.locator(".basis")).to_contain_text("Means of 3 steps")
        write_recording(tmp_path / "later", ranks=1, steps=20)
        (folder / "rank_0" / "events.log").write_bytes((tmp_path / "later" / "rank_0" / "events.log").read_bytes())
        page.reload()
        expect(page.locator(".basis")).to_contain_text("Means of 17 steps")


@pytest.mark.slow
def test_the_labels_of_many_ranks_stand_beside_their_lanes(open_page, tmp_path):
    with served(write_recording(tmp_path / "traces", ranks=24, steps=2), tmp_path / "server.log") as url:
        page = open_timeline(open_page, f"{url}timeline")
        bottoms = page.evaluate("[...document.querySelectorAll('.rank')].at(-1).getBoundingClientRect().bottom")
        lanes = page.locator("#lanes").bounding_box()
        assert lanes is not None
        assert page.evaluate(f"{LANES}.y_range.start") == pytest.approx(24 * 16)
        assert bottoms == pytest.approx(lanes["y"] + lanes["height"], abs=1)
