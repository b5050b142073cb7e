"""The page of the order of collectives as people meet it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage, served
from tests.ordered import Collective, all_reduce, end, steps, write_order
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ORDER = "Bokeh.documents[0].get_model_by_name('order')"
"""The figure of the lanes, in the page's script."""

STEPS = 40
DIVERGENCE = 3 * 30 + 1
"""Number of the collective that rank 1 alone launches, before those of step 30."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address at which ``serve`` begins with a recording in which rank 1 has launched one collective too many."""
    folder = tmp_path_factory.mktemp("faulty")
    extra = Collective(signature=all_reduce("extra", 4096), step=30, line=120)
    usual = steps(STEPS)
    write_recording(folder / "traces", ranks=3)
    write_order(folder / "traces", {0: usual, 1: [*usual[:90], extra, *usual[90:]], 2: usual})
    end(folder / "traces", range(3))
    with served(folder / "traces", folder / "server.log") as url:
        yield url


def open_order(open_page: OpenPage, url: str, **options: str) -> Page:
    page = open_page(url, **options)
    page.wait_for_function("document.body.dataset.answered > 0")
    return page


def wait_for_cell(page: Page, rank: int, number: int) -> None:
    expect(page.locator("body")).to_have_attribute("data-details", f"{rank} {number}")


def place_of(page: Page, lane: int, number: int) -> tuple[float, float]:
    """Where the middle of a cell is in the window."""
    box = page.locator("#order").bounding_box()
    assert box is not None
    lanes = page.locator(".names .lane").count()
    start, end_ = page.evaluate(f"[{ORDER}.x_range.start, {ORDER}.x_range.end]")
    width = page.evaluate(f"{ORDER}.inner_width")
    return box["x"] + (number - start) / (end_ - start) * width, box["y"] + (lane + 0.5) * box["height"] / lanes


def test_a_recording_with_a_fault_opens_by_itself_where_it_began(open_page, faulty):
    assert urlsplit(faulty).path == "/order"
    page = open_order(open_page, faulty)
    expect(page.locator(".kind")).to_have_text("Missing collective")
    expect(page.locator(".verdict")).to_contain_text("rank 1 launched")
    expect(page.get_by_role("link", name="Order")).to_have_attribute("aria-current", "page")
    wait_for_cell(page, 1, DIVERGENCE)
    start, end_ = page.evaluate(f"[{ORDER}.x_range.start, {ORDER}.x_range.end]")
    assert start < DIVERGENCE < end_


def test_clicking_a_cell_shows_the_call_sites_of_all_sides(open_page, faulty):
    page = open_order(open_page, f"{faulty}?number=60")
    page.get_by_role("button", name="First difference", exact=True).click()
    wait_for_cell(page, 1, DIVERGENCE)
    page.mouse.click(*place_of(page, lane=0, number=DIVERGENCE - 2))
    wait_for_cell(page, 0, DIVERGENCE - 2)
    expect(page.locator("#details .differs")).to_have_count(0)
    page.mouse.click(*place_of(page, lane=2, number=DIVERGENCE))
    wait_for_cell(page, 2, DIVERGENCE)
    details = page.locator("#details")
    for text in ("ranks 0, 2", "rank 1", "train.py:42 (main)", "train.py:120 (main)", "extra"):
        expect(details).to_contain_text(text)
    assert "call site" in details.locator(".differs th").all_text_contents()


def test_keys_move_the_cell_and_jump_to_differences_and_the_address_keeps_it(open_page, faulty):
    page = open_order(open_page, f"{faulty}?number=10&rank=0")
    wait_for_cell(page, 0, 10)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    wait_for_cell(page, 1, 11)
    page.keyboard.press("n")
    wait_for_cell(page, 1, DIVERGENCE)
    page.keyboard.press("n")
    wait_for_cell(page, 1, DIVERGENCE + 1)
    page.keyboard.press("p")
    wait_for_cell(page, 1, DIVERGENCE)
    page.keyboard.press("p")
    expect(page.locator("#jump-note")).to_have_text("no further difference")
    page.wait_for_function(f"new URLSearchParams(location.search).get('number') === '{DIVERGENCE}'")
    assert parse_qs(urlsplit(page.url).query)["rank"] == ["1"]
    page.reload()
    wait_for_cell(page, 1, DIVERGENCE)


@pytest.mark.nightly
def test_a_number_and_a_step_can_be_gone_to(open_page, faulty):
    page = open_order(open_page, faulty)
    page.locator("#number").fill("5")
    page.locator("#number").press("Enter")
    wait_for_cell(page, 1, 5)
    expect(page.locator("#step")).to_have_value("1")
    page.locator("#step").fill("20")
    page.locator("#step").press("Enter")
    wait_for_cell(page, 1, 61)
    page.locator("#place").fill("100")
    page.wait_for_function(f"{ORDER}.x_range.start < 100 && {ORDER}.x_range.end > 100")


def test_pointing_at_a_cell_reads_it(open_page, faulty):
    page = open_order(open_page, faulty)
    page.mouse.move(*place_of(page, lane=1, number=DIVERGENCE))
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"Rank 1 · #{DIVERGENCE}")
    expect(tip).to_contain_text("train.py:120 (main)")


def test_a_side_leads_to_its_step_on_the_timeline(open_page, faulty):
    page = open_order(open_page, f"{faulty}?number=4")
    page.locator("#details a").first.click()
    page.wait_for_url("**/timeline?step=1&rank=0*")


def test_the_overview_says_it_too_and_leads_there(open_page, faulty):
    page = open_page(faulty.removesuffix("order"))
    page.locator("h1.verdict").get_by_role("link").click()
    page.wait_for_url("**/order")


@pytest.mark.nightly
def test_dark_mode_paints_lanes_in_their_own_colors(open_page, faulty):
    palettes = []
    for theme in ("light", "dark"):
        page = open_order(open_page, faulty, theme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        cells = f"{ORDER}.renderers.find((one) => 'alpha' in one.data_source.data)"
        palettes.append(page.evaluate(f"{cells}.glyph.fill_color.transform.palette"))
    assert palettes[0] != palettes[1]


def test_the_lanes_alone_have_an_address_of_their_own(open_page, faulty):
    page = open_order(open_page, faulty.replace("/order", "/plots/order"))
    expect(page.locator("header")).to_have_count(0)
    page.mouse.click(*place_of(page, lane=0, number=DIVERGENCE))
    wait_for_cell(page, 0, DIVERGENCE)


def test_many_ranks_share_lanes_until_some_are_chosen(open_page, tmp_path):
    usual = steps(6)
    write_order(tmp_path / "traces", {rank: usual[:-1] if rank == 5 else usual for rank in range(24)})
    end(tmp_path / "traces", range(24))
    with served(tmp_path / "traces", tmp_path / "server.log") as url:
        page = open_order(open_page, f"{url.removesuffix('order')}order")
        expect(page.locator(".names .lane b")).to_have_text(["23 ranks", "rank 5"])
        page.locator("#chosen-ranks").fill("3-6")
        page.locator("#chosen-ranks").press("Enter")
        expect(page.locator(".names .lane b")).to_have_text(["rank 3", "rank 4", "rank 5", "rank 6"])
