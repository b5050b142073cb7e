"""The table of runs, as people meet it: sort, filter, open a run, come back, tag."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from overlapscope.trace import clocks
from overlapscope.trace.json_files import write_json
from overlapscope.trace.runs import RunNotes, read_notes
from overlapscope.trace.schema import RANK_FILE, rank_folder
from tests.browser.conftest import OpenPage, served
from tests.synthetic import make_rank, write_recording, write_step

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder" / "hang_3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, of 5, 12 and 20 steps, one with a name that is hard to write, and dumps of a job that hung."""
    folder = tmp_path_factory.mktemp("runs") / "traces"
    write_recording(folder / "short", ranks=1, steps=5)
    write_recording(folder / "nightly" / "timeline", ranks=2, steps=20)
    write_recording(folder / "odd #1 ?<b>&", ranks=1, steps=12)
    shutil.copytree(DUMPS, folder / "hung")
    return folder


@pytest.fixture(scope="module")
def table(folder: Path) -> Iterator[str]:
    with served(folder, folder.parent / "server.log") as url:
        yield url


def open_table(open_page: OpenPage, url: str, **options: str) -> Page:
    page = open_page(url, **options)
    expect(page.locator("body")).to_have_attribute("data-ready", "yes")
    return page


def names(page: Page) -> list[str]:
    return page.locator("tbody tr:visible th a").all_text_contents()


def row_of(page: Page, name: str) -> Locator:
    return page.locator("tbody tr").filter(has=page.get_by_role("link", name=name, exact=True))


def test_the_incident_is_on_top_and_all_verdicts_come_by_themselves(open_page, table):
    page = open_table(open_page, table)
    expect(page.locator(".reading")).to_have_count(0)
    assert names(page)[0] == "hung"
    expect(row_of(page, "hung")).to_contain_text("Stuck.")
    expect(row_of(page, "short")).to_contain_text("is hidden")
    expect(row_of(page, "short").locator("svg")).to_be_visible()


def test_a_click_on_a_header_sorts_and_the_address_keeps_it(open_page, table):
    page = open_table(open_page, table)
    steps = page.get_by_role("button", name="Steps", exact=True)
    steps.click()
    assert names(page) == ["nightly/timeline", "odd #1 ?<b>&", "short", "hung"]
    steps.click()
    assert names(page) == ["short", "odd #1 ?<b>&", "nightly/timeline", "hung"]
    page.reload()
    expect(page.locator("[data-key=steps]")).to_have_attribute("aria-sort", "ascending")
    assert names(page) == ["short", "odd #1 ?<b>&", "nightly/timeline", "hung"]
    steps.click()
    expect(page.locator("[aria-sort]")).to_have_count(0)
    assert "sort" not in page.url


def test_the_filter_searches_names_models_and_verdicts(open_page, table):
    page = open_table(open_page, table)
    expect(page.locator(".reading")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("STUCK")
    expect(page.locator("#count")).to_have_text("1 of 4 runs")
    assert names(page) == ["hung"]
    page.locator("#search").fill("gpt nightly")
    assert names(page) == ["nightly/timeline"]
    page.locator("#search").fill("nothing like it")
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#count")).to_have_text("4 runs")


def test_a_run_is_opened_with_its_pages_and_back_leads_to_the_table_as_it_was(open_page, table):
    page = open_table(open_page, f"{table}?q=nightly")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/nightly/timeline/-/")
    expect(page.locator(".verdict")).to_contain_text("is hidden")
    page.get_by_role("link", name="Timeline", exact=True).click()
    page.wait_for_url("**/runs/nightly/timeline/-/timeline")
    expect(page.locator("#status")).to_contain_text("in view")
    page.reload()
    expect(page.locator("#status")).to_contain_text("in view")
    page.go_back()
    expect(page.locator(".verdict")).to_contain_text("is hidden")
    page.go_back()
    expect(page.locator("body")).to_have_attribute("data-ready", "yes")
    assert names(page) == ["nightly/timeline"]


@pytest.mark.nightly
def test_an_odd_name_is_opened_and_leads_back(open_page, table):
    page = open_table(open_page, table)
    page.get_by_role("link", name="odd #1 ?<b>&", exact=True).click()
    expect(page.locator(".facts")).to_contain_text("odd #1 ?<b>&")
    page.locator(".breakdown-bar a", has_text="backward").first.click()
    expect(page.locator("#status")).to_contain_text("in view")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("body")).to_have_attribute("data-ready", "yes")
    assert len(names(page)) == 4


def test_an_incident_opens_where_it_is_explained(open_page, table):
    page = open_table(open_page, table)
    expect(row_of(page, "hung").locator(".incident")).to_be_visible()
    page.get_by_role("link", name="hung", exact=True).click()
    page.wait_for_url("**/runs/hung/-/order")
    expect(page.locator(".kind")).to_have_text("Stuck")


def test_tags_and_a_note_are_kept_found_and_removed(open_page, table, folder):
    page = open_table(open_page, table)
    row = row_of(page, "short")
    row.hover()
    row.get_by_role("button", name="Tags and note").click()
    page.get_by_label("Tags, with commas").fill("baseline, <i>x</i>")
    page.locator("#notes-note").fill("before the change")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("dialog")).to_be_hidden()
    expect(row.locator(".tag")).to_have_text(["baseline", "<i>x</i>"])
    assert read_notes(folder / "short") == RunNotes(tags=("baseline", "<i>x</i>"), note="before the change")
    row.get_by_role("button", name="baseline").click()
    expect(page.locator("#count")).to_have_text("1 of 4 runs")
    page.locator("#search").fill("before the change")
    assert names(page) == ["short"]
    row.get_by_role("button", name="Tags and note").click()
    page.get_by_label("Tags, with commas").fill("")
    page.locator("#notes-note").fill("")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(row.locator(".tag")).to_have_count(0)
    assert not (folder / "short" / "notes.json").exists()


def test_notes_that_can_not_be_kept_say_why_and_stay_in_the_window(open_page, table, folder):
    page = open_table(open_page, table)
    (folder / "odd #1 ?<b>&" / "notes.json").mkdir()
    try:
        row = row_of(page, "odd #1 ?<b>&")
        row.hover()
        row.get_by_role("button", name="Tags and note").click()
        page.locator("#notes-note").fill("kept?")
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("notes.json")
        expect(page.locator("#notes-note")).to_have_value("kept?")
    finally:
        (folder / "odd #1 ?<b>&" / "notes.json").rmdir()


def test_runs_appear_and_go_on_while_the_page_is_open(open_page, tmp_path):
    folder = tmp_path / "later"
    with served(folder, tmp_path / "server.log") as url:
        page = open_table(open_page, url)
        expect(page.get_by_role("heading")).to_contain_text("nothing to show yet")
        log = make_rank(folder / "job", 0, world_size=1)
        sample = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        where = {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": clocks.get_boot_id()}
        write_json(rank_folder(folder / "job", 0) / RANK_FILE, {"rank": 0, **where, "clock_samples": [sample]})
        row = row_of(page, "job")
        expect(row.locator(".live")).to_be_visible()
        for step in range(3):
            write_step(log, step, begin_ns=1_000_000_000 + step * 10_000_000)
        expect(row.locator("td").nth(4)).to_have_text("3")
        log.close()
        write_json(rank_folder(folder / "job", 0) / "ended.json", {"how": "exit"})
        expect(row.locator(".live")).to_have_count(0)


def test_keys_move_between_runs_and_compare_what_is_chosen_and_columns_can_be_hidden(open_page, table):
    page = open_table(open_page, table)
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("group", name="Columns of the table").get_by_text("Model").click()
    page.keyboard.press("Escape")
    for reopened in (False, True):  # the choice is kept
        if reopened:
            page.goto(table)
        expect(page.locator(".column-model").first).to_be_hidden()
        expect(page.locator(".column-hidden").first).to_be_visible()
    heading = page.locator("[data-key=steps]").bounding_box()
    assert heading is not None
    page.mouse.click(heading["x"] + 2, heading["y"] + heading["height"] - 2)  # its corner
    expect(page.locator("[data-key=steps]")).to_have_attribute("aria-sort", "descending")
    for name in ("short", "nightly/timeline", "odd #1 ?<b>&"):
        row_of(page, name).get_by_role("link", name=name, exact=True).focus()
        page.keyboard.press("x")
    page.keyboard.press("c")
    page.wait_for_url("**/compare?base=short&new=*&new=*")
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.locator("tbody")).not_to_contain_text("comparing", timeout=60_000)
    page.get_by_role("link", name="Choose other runs").click()
    expect(page.locator(".side:checked")).to_have_count(3)
    open_table(lambda url: page.goto(url) and page, table)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator("tbody tr").nth(1).locator("a")).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#search")).to_be_focused()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_narrow_window_shows_names_figures_and_verdicts(open_page, table, theme):
    page = open_table(open_page, table, theme=theme)
    page.set_viewport_size({"width": 800, "height": 700})
    verdict = row_of(page, "short").locator(".verdict")
    box = verdict.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 800
    expect(row_of(page, "short").locator(".narrow")).to_have_text("GPT · cpu")
