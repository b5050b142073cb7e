"""The page of bucket sizes as people meet it."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage, served
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

STEPS = "Bokeh.documents[0].get_model_by_name('steps')"
CURVE = "Bokeh.documents[0].get_model_by_name('curve')"
PREDICTED = f"{STEPS}.renderers[1].data_source.data"
"""Rectangles of the predicted step, in the page's script."""


def open_buckets(open_page: OpenPage, url: str, query: str = "", **options: str) -> Page:
    page = open_page(f"{url}buckets{query}", **options)
    page.wait_for_function("document.body.dataset.answered > 0", timeout=30_000)
    return page


def wait_for_setting(page: Page, text: str) -> None:
    expect(page.locator("#setting")).to_have_text(text)


def slide_to(page: Page, cap_mb: float) -> None:
    page.locator("#size").evaluate(
        "(slider, mb) => { slider.value = Math.log10(mb); slider.dispatchEvent(new Event('input', {bubbles: true})) }",
        cap_mb,
    )


def test_the_page_opens_with_the_advice_at_the_best_size(open_page, address):
    page = open_buckets(open_page, address)
    expect(page.locator(".verdict")).to_contain_text("it hardly matters here")
    expect(page.get_by_role("link", name="Buckets")).to_have_attribute("aria-current", "page")
    wait_for_setting(page, "bucket_cap_mb=2")
    expect(page.locator("#predicted-title")).to_have_text("Predicted: 2 MB")


def test_the_slider_redraws_the_predicted_step_and_leaves_the_recorded_one(open_page, address):
    page = open_buckets(open_page, address, "?cap_mb=0.5")
    wait_for_setting(page, "bucket_cap_mb=1")
    recorded = f"Array.from({STEPS}.renderers[0].data_source.data.right)"
    before, was_recorded = page.evaluate(f"{PREDICTED}.left.length"), page.evaluate(recorded)
    slide_to(page, 40.0)
    wait_for_setting(page, "bucket_cap_mb=25")
    # two ranks, each with a bucket instead of three
    assert page.evaluate(f"{PREDICTED}.left.length") == before - 4
    assert page.evaluate(recorded) == was_recorded
    expect(page.locator("#chosen")).to_contain_text("of 25 MB")
    page.wait_for_function("new URLSearchParams(location.search).get('cap_mb') === '40'")
    page.reload()
    wait_for_setting(page, "bucket_cap_mb=25")


def test_a_click_in_the_plot_and_arrows_choose_a_size(open_page, address):
    page = open_buckets(open_page, address)
    box = page.locator("#curve").bounding_box()
    assert box is not None
    left, width = page.evaluate(
        f"(() => {{ const b = Bokeh.index.find_one({CURVE}).frame.bbox; return [b.x, b.width] }})()"
    )
    page.mouse.click(box["x"] + left + width - 5, box["y"] + 100)
    wait_for_setting(page, "bucket_cap_mb=25")
    page.locator("body").press("ArrowLeft")
    wait_for_setting(page, "bucket_cap_mb=2")
    page.locator("#size").press("ArrowLeft")
    wait_for_setting(page, "bucket_cap_mb=1")


def test_plans_that_are_no_size_have_buttons_and_keys(open_page, address):
    page = open_buckets(open_page, address)
    page.get_by_role("button", name="DDP's default").click()
    wait_for_setting(page, "bucket_cap_mb=None")
    expect(page.get_by_role("button", name="DDP's default")).to_have_attribute("aria-pressed", "true")
    page.wait_for_function("new URLSearchParams(location.search).get('plan') === 'default'")
    page.keyboard.press("n")
    expect(page.locator("#predicted-title")).to_have_text("Predicted: Current plan")
    page.keyboard.press("p")
    expect(page.locator("#predicted-title")).to_have_text("Predicted: Best plan")


def test_the_first_bucket_and_compression_change_prediction_curve_and_address(open_page, address):
    page = open_buckets(open_page, address, "?cap_mb=40")
    wait_for_setting(page, "bucket_cap_mb=25")
    curve = f"Array.from({CURVE}.renderers[0].data_source.data.high)"
    before = page.evaluate(curve)
    page.get_by_text("1 MB", exact=True).first.click()
    wait_for_setting(page, "bucket_cap_mb_list=[1, 25]")
    page.get_by_text("fp16", exact=True).click()
    expect(page.locator("#setting")).to_contain_text("fp16_compress_hook")
    assert page.evaluate(curve) != before
    page.wait_for_function("new URLSearchParams(location.search).get('compression') === 'fp16'")
    query = parse_qs(urlsplit(page.url).query)
    assert query["first"] == ["1"]
    page.get_by_text("other", exact=True).click()
    page.locator("#first-mb").fill("0.5")
    page.locator("#first-mb").press("Enter")
    expect(page.locator("#setting")).to_contain_text("bucket_cap_mb_list=[0.5, 25]")


def test_the_setting_can_be_copied(open_page, address):
    page = open_buckets(open_page, address)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy this setting").click()
    expect(page.locator("#copied")).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == "bucket_cap_mb=2"


def test_pointing_at_the_curve_and_the_plan_reads_them(open_page, address):
    page = open_buckets(open_page, address)
    tip = page.locator("#tip")
    for area, text in (("#curve", "90 % interval"), ("#strip", "weight")):
        page.locator(area).scroll_into_view_if_needed()
        page.locator(area).hover()
        expect(tip).to_contain_text(text)


@pytest.mark.nightly
def test_dark_mode_paints_curve_and_steps_in_their_own_colors(open_page, address):
    painted = []
    for theme in ("light", "dark"):
        page = open_buckets(open_page, address, theme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        line = page.evaluate(f"{CURVE}.renderers[0].glyph.fill_color.value ?? {CURVE}.renderers[0].glyph.fill_color")
        painted.append((line, page.evaluate(f"{STEPS}.renderers[0].glyph.fill_color.transform.palette")))
    assert painted[0][0] != painted[1][0]
    assert painted[0][1] != painted[1][1]


def test_a_recording_that_tells_nothing_says_how_to_record_it(open_page, tmp_path):
    write_recording(tmp_path / "traces", ranks=1, steps=6)
    with served(tmp_path / "traces", tmp_path / "server.log") as url:
        page = open_page(f"{url}buckets")
        expect(page.get_by_role("heading")).to_have_text("No bucket size can be predicted from this recording")
        expect(page.locator("main")).to_contain_text("2 ranks or more")
