"""The report, opened from disk in a browser that has no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Frame, Page, expect

from dashboards.theme import browser_colors
from overlapscope import open as open_run
from overlapscope.cli.main import main
from overlapscope.text import format_ns, format_share, format_value
from tests.synthetic import write_straggling_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 ranks, of which rank 1 is 3 ms late in every step."""
    return write_straggling_recording(
        tmp_path_factory.mktemp("report") / "traces",
        late_us=lambda rank, step: 3_000 * (rank == 1) + 70 * ((7 * rank + 3 * step) % 5),
        ranks=20,
        steps=30,
    )


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    output = folder.parent / "report.html"
    assert main(["report", str(folder), "-o", str(output)]) == 0
    return output


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.nightly)])
def page(request: pytest.FixtureRequest, browser: Browser, written: Path) -> Iterator[Page]:
    """The report; the test fails if it asks for anything but itself, or logs an error."""
    context = browser.new_context(viewport={"width": 1300, "height": 800}, color_scheme=request.param, offline=True)
    page, wrong = context.new_page(), []
    page.on("request", lambda asked: wrong.append(asked.url) if asked.url != written.as_uri() else None)
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(written.as_uri())
    expect(page.locator("html")).to_have_attribute("data-theme", request.param)
    yield page
    context.close()
    assert wrong == []


def view(page: Page | Frame) -> tuple[float, float]:
    """What of the step is shown, in nanoseconds."""
    expect(page.locator("body")).to_have_attribute("data-answered", re.compile(r"\d"))
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    start, end = page.evaluate(
        """() => {
          const {start, end} = Bokeh.index.roots.find(({model}) => model.name === "lanes_0").model.x_range
          return [start, end]
        }"""
    )
    return start, end


def test_it_shows_what_the_summary_says(page: Page, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["summary", str(folder), "--json"])
    said = json.loads(capsys.readouterr().out)
    overview = page.locator("#overview")
    expect(overview.locator(".verdict")).to_contain_text(said["sentence"])
    expect(overview.locator(".headlines .value").first).to_have_text(format_ns(said["breakdown"]["step_ns"]["value"]))
    expect(overview.locator(".headlines .value").last).to_have_text(format_share(said["breakdown"]["overlap_ratio"]))
    expect(overview.locator(".breakdown table")).to_contain_text(
        format_value(said["breakdown"]["blocks_ns"]["exposed"]["value"], "ms")
    )


def test_the_typical_step_is_zoomed_panned_and_shown_whole_again(page: Page) -> None:
    step = page.locator("#lanes_0")
    step.scroll_into_view_if_needed()
    whole = view(page)
    box = step.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.wheel(0, -400)
    zoomed = view(page)
    assert zoomed[1] - zoomed[0] < 0.7 * (whole[1] - whole[0])
    assert sum(zoomed) == pytest.approx(sum(whole), rel=0.05), "about the pointer"
    page.keyboard.press("ArrowRight")
    moved = view(page)
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0], rel=0.01)
    page.keyboard.press("+")
    assert view(page)[1] - view(page)[0] < moved[1] - moved[0]
    page.keyboard.press("0")
    assert view(page) == whole


def test_the_wheel_scrolls_the_page_until_the_step_has_been_clicked(page: Page) -> None:
    step = page.locator("#lanes_0")
    step.scroll_into_view_if_needed()
    whole, before = view(page), page.evaluate("scrollY")
    step.hover()
    page.mouse.wheel(0, -200)
    page.wait_for_function("(before) => scrollY < before", arg=before)
    assert view(page) == whole


def test_pointing_at_a_span_says_what_it_is_and_the_table_says_the_same(page: Page) -> None:
    step = page.locator("#lanes_0")
    step.scroll_into_view_if_needed()
    view(page)
    at = page.evaluate(
        """() => {
          const {model} = Bokeh.index.roots.find(({model}) => model.name === "lanes_0")
          const {data} = model.renderers.map((each) => each.data_source).find(({data}) => data.title)
          const span = data.text.indexOf("backward")
          const {start, end} = model.x_range
          const share = ((data.left[span] + data.right[span]) / 2 - start) / (end - start)
          return {x: share * model.inner_width, y: 24 + (data.top[span] + data.bottom[span]) / 2}
        }"""
    )
    step.hover(position=at)
    expect(page.locator("#tip strong")).to_have_text("Backward")
    page.get_by_text("Phases and collectives as a table").click()
    expect(page.locator("#timeline tbody tr", has_text="Backward").first).to_be_visible()


def test_plots_are_painted_in_the_colors_of_the_theme(page: Page) -> None:
    """On the map of lateness, rank 1 is in the second row, and the only late one."""
    expect(page.locator("#stragglers .bk-Figure")).to_have_count(3)
    found = page.evaluate(
        """() => {
          const view = [...Bokeh.index.roots].find((view) => view.el.closest(".map"))
          const renderer = view.model.renderers[0]
          return {palette: renderer.glyph.color_mapper.palette, ink: view.model.below[0].major_label_text_color}
        }"""
    )
    colors = browser_colors()[str(page.locator("html").get_attribute("data-theme"))]
    assert found["palette"] == colors["lateness_palette"]
    assert found["ink"] == colors["muted"]


def test_pointing_at_a_trend_says_the_step_and_its_figure(page: Page) -> None:
    readout = page.locator("[data-readout=step_time_ns]")
    idle = readout.text_content()
    page.locator("#overview .trend .bk-Figure").first.hover(position={"x": 200, "y": 80})
    expect(readout).not_to_have_text(str(idle))
    expect(readout).to_have_text(re.compile(r"^step \d+: [\d.]+ ms"))


def test_the_theme_can_be_changed_although_there_is_no_server(page: Page) -> None:
    before = page.locator("html").get_attribute("data-theme")
    page.locator("#theme").click()
    expect(page.locator("html")).not_to_have_attribute("data-theme", str(before))


def test_links_lead_within_the_file(page: Page) -> None:
    page.locator("header nav").get_by_text("Buckets").click()
    expect(page.locator("#buckets .verdict")).to_be_in_viewport()


def test_a_notebook_shows_a_chapter_in_a_frame_of_its_own(browser: Browser, folder: Path) -> None:
    context = browser.new_context(viewport={"width": 1000, "height": 800}, offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_content(open_run(folder).timeline()._repr_html_())
    frame = page.frames[1]
    before = view(frame)
    frame.locator("#lanes_0").click()
    page.keyboard.press("+")
    assert view(frame) != before
    context.close()
    assert wrong == []


def test_printing_shows_what_is_folded_on_light_paper(page: Page) -> None:
    expect(page.locator("#overview tbody[hidden]")).to_be_hidden()
    theme = page.locator("html").get_attribute("data-theme")
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    expect(page.locator("#overview tbody[hidden]")).to_be_visible()
    expect(page.locator("#timeline details table")).to_be_visible()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--surface')") == "#ffffff"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    expect(page.locator("html")).to_have_attribute("data-theme", str(theme))
