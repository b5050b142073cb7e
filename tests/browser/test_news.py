"""A page of a recording that is being written says what is newer than it, and shows that when it is told to."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from overlapscope.trace.clocks import get_boot_id
from overlapscope.trace.schema import EVENTS_FILE, RANK_FILE
from tests.browser.conftest import served
from tests.browser.test_app import LANES, open_timeline
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def write_live_recording(folder: Path, *, ranks: int = 2, steps: int = 30, close: bool = True) -> Path:
    """A recording whose processes run for as long as this one does."""
    recording = write_recording(folder, ranks=ranks, steps=steps, close=close)
    for path in recording.glob(f"rank_*/{RANK_FILE}"):
        here = {
            "host": socket.gethostname(),
            "boot_id": get_boot_id(),
            "pid": os.getpid(),
            "time_ns": time.monotonic_ns(),
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | here))
    return recording


def grow(folder: Path, scratch: Path, steps: int, *, close: bool = True) -> None:
    """The recording has gone on to so many steps."""
    ranks = [rank.name for rank in folder.glob("rank_*")]
    later = write_recording(scratch, ranks=len(ranks), steps=steps, close=close)
    for rank in ranks:
        (folder / rank / EVENTS_FILE).write_bytes((later / rank / EVENTS_FILE).read_bytes())


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "traces", steps=10)


def test_a_recording_that_is_over_has_no_news(open_page, recording, tmp_path):
    with served(recording, tmp_path / "server.log") as url:
        page = open_page("about:blank")
        with page.expect_response("**/news") as answer:
            page.goto(url)
        assert answer.value.json() == {
            "is_live": False,
            "latest_step": 9,
            "age_s": None,
            "off_since": None,
            "report": "",
        }
        expect(page.locator("#news")).to_be_hidden()


def test_newer_steps_are_counted_and_shown_when_asked_for(open_page, tmp_path):
    recording = write_live_recording(tmp_path / "traces", steps=10)
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(url)
        expect(page.locator("#news")).to_have_attribute("aria-busy", "false")
        grow(recording, tmp_path / "later", 25)
        news = page.locator("#news")
        expect(news).to_contain_text("15 newer steps")
        expect(page.locator(".basis")).to_contain_text("Means of 7 steps")
        news.get_by_role("button", name="Show").click()
        expect(page.locator(".basis")).to_contain_text("Means of 22 steps")


def test_a_page_that_follows_shows_the_newest_step_by_itself(open_page, tmp_path):
    recording = write_live_recording(tmp_path / "traces", steps=10)
    with served(recording, tmp_path / "server.log") as url:
        page = open_timeline(open_page, f"{url}timeline?step=9")
        expect(page.locator("#news")).to_have_attribute("aria-busy", "false")
        grow(recording, tmp_path / "later", 25)
        expect(page.locator("#news")).to_contain_text("15 newer steps")
        page.locator("#news").get_by_label("Follow").check()
        page.wait_for_function("new URLSearchParams(location.search).get('step') === '24'")
        page.wait_for_function(f"window.Bokeh?.documents[0] && {LANES}?.x_range.end > 2.4e8")
        expect(page.locator("#news").get_by_label("Follow")).to_be_checked()


def test_the_steps_that_are_shown_are_named_and_others_can_be_asked_for(open_page, recording, tmp_path):
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(f"{url}?read=4:8")
        expect(page.locator(".basis")).to_contain_text("Means of 4 steps")
        steps = page.get_by_label("steps", exact=True)
        expect(steps).to_have_value("4:8")
        steps.fill("5-10")
        steps.press("Enter")
        expect(steps).to_have_js_property("validity.valid", False)
        steps.fill("5:10")
        steps.press("Enter")
        expect(page.locator(".basis")).to_contain_text("Means of 5 steps")
        page.get_by_role("link", name="Stragglers", exact=True).click()
        expect(steps).to_have_value("5:10")
        page.get_by_role("button", name="All steps").click()
        expect(page.locator("#news")).to_be_hidden()
