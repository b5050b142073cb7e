"""The stragglers page as people meet it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage, served
from tests.synthetic import write_straggling_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MAP = "Bokeh.documents[0].get_model_by_name('heatmap')"
"""The figure of the map, in the page's script."""


@pytest.fixture(scope="module")
def straggling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a recording of eight ranks on two hosts, of which rank 2 is late."""
    folder = tmp_path_factory.mktemp("straggling")
    write_straggling_recording(
        folder / "traces", late_us=lambda rank, step: 3_000 if rank == 2 else 20 * ((rank + step) % 3), ranks=8
    )
    with served(folder / "traces", folder / "server.log") as url:
        yield url


def open_stragglers(open_page: OpenPage, url: str, **options: str) -> Page:
    page = open_page(url, **options)
    wait_for(page, "lateness")
    return page


def wait_for(page: Page, figure: str, grouping: str = "ranks") -> None:
    expect(page.locator("body")).to_have_attribute("data-shown", f"{figure} {grouping}")
    page.wait_for_function("Bokeh.documents[0].is_idle")


def shades(page: Page) -> list[int]:
    """The picture, row by row."""
    return list(page.evaluate(f"Array.from({MAP}.renderers[0].data_source.data.image[0])"))


def place_of(page: Page, rank: int, step: int) -> tuple[float, float]:
    """Where the middle of a cell is in the window."""
    frame = page.evaluate(
        f"(() => {{ const {{left, top}} = document.querySelector('#heatmap').getBoundingClientRect();"
        f" const view = Bokeh.index.find_one({MAP});"
        f" return [left + view.frame.bbox.left + view.frame.x_scale.compute({step}) - view.frame.bbox.left,"
        f" top + view.frame.y_scale.compute({rank})] }})()"
    )
    padding = float(page.evaluate("parseFloat(getComputedStyle(document.querySelector('#heatmap')).paddingLeft)"))
    return frame[0] + padding, frame[1]


def steps_shown(page: Page) -> float:
    return float(page.evaluate(f"{MAP}.x_range.end - {MAP}.x_range.start"))


def test_the_page_names_the_late_rank(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}stragglers")
    expect(page.locator(".verdict")).to_contain_text("Rank 2 arrives")
    expect(page.locator(".blame tbody tr")).to_have_count(1)
    expect(page.locator("#scale-high")).to_contain_text("ms")
    expect(page.get_by_role("link", name="Stragglers")).to_have_attribute("aria-current", "page")


def test_a_finding_opens_its_worst_step_on_the_timeline(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}stragglers")
    page.locator(".blame tbody a").click()
    page.wait_for_url("**/timeline?step=*&rank=2*")
    expect(page.locator("#status")).to_contain_text("in view")


def test_switches_and_keys_change_the_picture_and_the_address_keeps_it(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}stragglers")
    late = shades(page)
    page.get_by_text("Wait", exact=True).click()
    wait_for(page, "wait")
    waiting = shades(page)
    assert waiting != late
    page.keyboard.press("2")
    wait_for(page, "lateness")
    assert shades(page) == late
    page.get_by_text("Hosts", exact=True).click()
    wait_for(page, "lateness", "hosts")
    assert len(shades(page)) == len(late) // 4
    page.reload()
    wait_for(page, "lateness", "hosts")


def test_switches_are_reached_with_the_tabulator_and_changed_with_arrows(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}stragglers")
    page.locator(".blame tbody a").focus()
    for name in ("Save the map of ranks and steps", "Lateness"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("button" if name.startswith("Save") else "radio", name=name)).to_be_focused()
    page.keyboard.press("ArrowRight")
    wait_for(page, "wait")


def test_pointing_at_a_cell_reads_it_and_a_click_opens_that_step(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}stragglers")
    x, y = place_of(page, rank=2, step=17)
    page.mouse.move(x, y)
    tip = page.locator("#tip")
    expect(tip).to_contain_text("Rank 2 · step 17")
    expect(tip).to_contain_text("for no later rank")
    page.mouse.click(x, y)
    page.wait_for_url("**/timeline?*")
    asked = parse_qs(urlsplit(page.url).query)
    assert asked["step"] == ["17"]
    assert asked.get("rank", ["2"]) == ["2"]
    expect(page.locator("#status")).to_contain_text("in view")
    expect(page.locator("#step")).to_have_value("17")


def test_the_wheel_and_keys_zoom_and_everything_can_be_shown_again(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}stragglers")
    whole = steps_shown(page)
    page.mouse.move(*place_of(page, rank=4, step=15))
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"{MAP}.x_range.end - {MAP}.x_range.start < {whole}")
    zoomed = steps_shown(page)
    page.keyboard.press("w")
    assert steps_shown(page) < zoomed
    page.get_by_role("button", name="Show all").click()
    assert steps_shown(page) == whole


def test_dark_mode_paints_the_map_in_its_own_colors(open_page, straggling):
    palettes = []
    for theme in ("light", "dark"):
        page = open_stragglers(open_page, f"{straggling}stragglers", theme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        palettes.append(page.evaluate(f"{MAP}.renderers[0].glyph.color_mapper.palette"))
    light, dark = palettes
    assert light[0] == dark[0]
    assert light[1:] != dark[1:]


def test_the_map_alone_has_its_own_address(open_page, straggling):
    page = open_stragglers(open_page, f"{straggling}plots/stragglers")
    expect(page.locator("header")).to_have_count(0)
    x, y = place_of(page, rank=0, step=9)
    page.mouse.click(x, y)
    page.wait_for_url("**/timeline?*")


def test_folded_rows_can_be_unfolded(open_page, tmp_path):
    write_straggling_recording(tmp_path / "traces", late_us=lambda rank, _: rank, ranks=20, steps=6)
    with served(tmp_path / "traces", tmp_path / "server.log") as url:
        page = open_stragglers(open_page, f"{url}stragglers")
        rows = page.locator(".what-if section", has_text="Lateness and saving of each rank").locator("tbody tr:visible")
        expect(rows).to_have_count(16)
        page.get_by_role("button", name="and 4 more").click()
        expect(rows).to_have_count(20)
        expect(page.get_by_role("button", name="and 4 more")).to_have_count(0)


def test_a_narrow_window_has_no_more_columns_than_pixels(open_page, tmp_path):
    write_straggling_recording(tmp_path / "traces", late_us=lambda rank, _: rank, ranks=2, steps=300)
    with served(tmp_path / "traces", tmp_path / "server.log") as url:
        page = open_stragglers(open_page, f"{url}stragglers")
        assert len(shades(page)) == 2 * 296
        page.set_viewport_size({"width": 390, "height": 700})
        page.wait_for_function(f"{MAP}.renderers[0].data_source.data.image[0].shape[1] === 148")
