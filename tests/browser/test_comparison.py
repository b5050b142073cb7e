"""The page of a comparison: on a server, from the table of runs, and opened as the file that it can be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, served
from tests.browser.test_layout import CUT
from tests.browser.test_runs import open_table, row_of
from tests.cli.command_line import overlapscope
from tests.cli.test_compare import recorded

pytestmark = [pytest.mark.browser, pytest.mark.slow]

COLORS = """(canvas) => {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)
  return new Set(pixels).size
}"""
"""How many colors are on a canvas: one if nothing is drawn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and one with a forward that takes 0.5 ms longer."""
    folder = tmp_path_factory.mktemp("comparison") / "runs"
    recorded(folder / "base", 0, 0)
    recorded(folder / "nightly" / "new #1 &", 2, 500)
    return folder


@pytest.fixture(scope="module")
def table(folder: Path) -> Iterator[str]:
    with served(folder, folder.parent / "server.log") as url:
        yield url


def compared(page: Page) -> Page:
    expect(page.locator(".verdict")).to_be_visible()
    return page


def lanes(page: Page) -> list[Locator]:
    """The canvas of both steps, when they are drawn."""
    expect(page.locator("body")).to_have_attribute("data-answered", re.compile(r"\d"))
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return [page.locator(f"#lanes_{index} canvas").nth(2) for index in range(2)]


def is_drawn(page: Page) -> bool:
    """Whether there are steps of both sides."""
    return all(canvas.evaluate(COLORS) > 20 for canvas in lanes(page))


def test_two_runs_are_chosen_by_keys_swapped_compared_and_found_again(
    open_page: OpenPage, table: str, folder: Path
) -> None:
    page = open_table(open_page, table)
    for _ in range(2):
        page.keyboard.press("ArrowDown")
        page.keyboard.press("c")
    expect(page.locator("#pair-base")).to_have_text("base")
    expect(page.locator("#pair-new")).to_have_text("nightly/new #1 &")
    expect(row_of(page, "base").locator(".chosen")).to_have_text("base")
    page.get_by_role("button", name="Swap base and new").click()
    expect(row_of(page, "base").locator(".chosen")).to_have_text("new")
    page.reload()
    expect(page.locator("#pair-new")).to_have_text("base")
    page.get_by_role("link", name="Compare", exact=True).last.click()
    expect(compared(page).locator(".verdict")).to_contain_text("Faster: 10.5 ms → 10.0 ms")
    page.get_by_role("link", name="Swap base and new").click()
    said = overlapscope("compare", folder / "base", folder / "nightly" / "new #1 &").stdout
    sentence = next(line for line in said.splitlines() if line.startswith("Slower"))
    expect(compared(page).locator(".verdict")).to_have_text(sentence)
    page.reload()
    expect(compared(page).locator(".verdict")).to_have_text(sentence)
    assert is_drawn(page)
    page.get_by_role("link", name="timeline of the new one").first.click()
    expect(page.locator("#status")).to_contain_text("in view")
    expect(page.locator(".facts")).to_contain_text("nightly/new #1 &")
    page.go_back()
    expect(compared(page).locator(".verdict")).to_have_text(sentence)
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("body")).to_have_attribute("data-ready", "yes")


@pytest.mark.nightly
def test_ranges_of_one_run_are_compared_from_its_pages(open_page: OpenPage, table: str) -> None:
    page = open_page(f"{table}runs/base/-/stragglers")
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.locator(".basis")).to_contain_text("Both sides are the same steps of base.")
    page.get_by_role("link", name="compare the first half with the second").click()
    expect(page.locator(".basis").first).to_contain_text("Base: base steps 0 to 18")
    page.get_by_label("Base").get_by_label("Steps").fill("5:20")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".basis").first).to_contain_text("Base: base steps 5 to 19")
    expect(page.get_by_label("New").get_by_label("Steps")).to_have_value("19:")
    expect(page.locator(".verdict")).to_contain_text("No significant difference: 10.0 ms → ")
    assert is_drawn(page)


@pytest.mark.nightly
def test_any_of_the_steps_that_differ_most_is_drawn_by_click_and_keys_and_found_again(
    open_page: OpenPage, table: str
) -> None:
    page = compared(open_page(f"{table}compare?base=base&new=nightly%2Fnew%20%231%20%26"))
    choices, drawn = page.get_by_role("radio"), page.locator(".pair h3").first
    numbers = [each.get_attribute("value") for each in choices.all()]
    assert len(set(numbers)) == 5
    expect(drawn).to_contain_text(f"step {numbers[0]} of base")
    page.locator("tr:has(input)").nth(2).locator("td").first.click()
    expect(drawn).to_contain_text(f"step {numbers[2]} of base")
    expect(choices.nth(2)).to_be_checked()
    choices.nth(2).press("ArrowDown")
    expect(drawn).to_contain_text(f"step {numbers[3]} of base")
    expect(choices.nth(3)).to_be_focused()
    assert is_drawn(page)
    page.go_back()
    expect(drawn).to_contain_text(f"step {numbers[2]} of base")
    page.reload()
    expect(drawn).to_contain_text(f"step {numbers[2]} of base")
    page.go_back()
    expect(drawn).to_contain_text(f"step {numbers[0]} of base")


def test_a_focus_that_moved_while_the_next_page_was_drawn_stays(open_page: OpenPage, table: str) -> None:
    page = compared(open_page(f"{table}compare?base=base&new=nightly%2Fnew%20%231%20%26"))
    choices = page.get_by_role("radio")
    page.add_init_script(
        "addEventListener('DOMContentLoaded', () => setTimeout(() => document.querySelector('[name=drawn]').focus()))"
    )
    page.locator("tr:has(input)").nth(2).locator("td").first.click()  # this gives the focus to the page
    expect(choices.nth(2)).to_be_checked()
    compared(page)
    page.evaluate("new Promise((drawn) => setTimeout(drawn, 200))")
    expect(choices.first).to_be_focused()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_in_a_narrow_window_nothing_is_cut_off_and_both_steps_move_together(
    open_page: OpenPage, table: str, theme: str
) -> None:
    page = compared(open_page(f"{table}compare?base=base&new=nightly%2Fnew%20%231%20%26", theme))
    page.set_viewport_size({"width": 800, "height": 900})
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 800
    before = [canvas.screenshot() for canvas in lanes(page)]
    page.locator("#lanes_0").click()
    page.keyboard.press("+")
    after = [canvas.screenshot() for canvas in lanes(page)]
    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_file_opens_without_a_server_in_the_theme_of_the_system(
    tmp_path: Path, folder: Path, open_page: OpenPage, theme: str
) -> None:
    ran = overlapscope("compare", folder / "base", folder / "nightly" / "new #1 &", "--format", "html")
    assert ran.returncode == 3
    (tmp_path / "comparison.html").write_text(ran.stdout)
    page = open_page((tmp_path / "comparison.html").as_uri(), theme)
    assert page.locator("html").get_attribute("data-theme") == theme
    assert page.get_by_role("heading", level=1).inner_text().startswith("Slower: ")
    zero, step = (page.locator(".waterfall").locator(at).bounding_box() for at in ("s >> nth=0", ".total i"))
    assert zero is not None
    assert step is not None
    assert step["width"] > 100
    assert abs(step["x"] - zero["x"]) < 100
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert is_drawn(page)
