"""A page that follows a recording changes in place: nothing blinks or jumps, and nobody is interrupted."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Page, Route, ViewportSize, expect

from overlapscope.trace.schema import MACHINE_FILE
from tests.browser.conftest import OpenPage, served
from tests.browser.test_app import LANES, wait_for_step
from tests.browser.test_news import grow, write_live_recording
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LIBRARY = "**/static/js/bokeh.min.js"
HEADER_PX = 110
RANKS = 24
LOW_WINDOW: ViewportSize = {"width": 1300, "height": 500}
"""One in which so many ranks have to be scrolled."""


class Frames:
    """What is seen of a page, picture by picture, with the moments at which it was drawn."""

    def __init__(self, page: Page) -> None:
        self._frames: list[tuple[float, bytes]] = []
        self._session = page.context.new_cdp_session(page)
        self._session.on("Page.screencastFrame", self._keep)
        self._session.send("Page.startScreencast", {"format": "png", "everyNthFrame": 1})

    def _keep(self, frame: dict[str, Any]) -> None:
        self._frames.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
        self._session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    def filled(self) -> list[float]:
        """Of each picture until now, without the header, the share that is not background."""
        self._session.remove_listener("Page.screencastFrame", self._keep)
        return [_filled(picture) for _, picture in sorted(self._frames)]


def _filled(picture: bytes) -> float:
    pixels: NDArray[np.int_] = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    return float((abs(pixels[HEADER_PX:] - pixels[-3, 3]).sum(axis=2) > 30).mean())


def follow(page: Page) -> None:
    page.locator("#news").get_by_label("Follow").check()


def followed(page: Page, *, in_place: bool = True) -> None:
    """Wait until the page has been changed in place or opened again, and what it shows is drawn."""
    # A page that took long to open rests twice as long before that.
    is_shown = "(document.body.dataset.followed || !window.isTheOldPage)"
    page.wait_for_function(f"{is_shown} && window.Bokeh?.documents[0]?.is_idle", timeout=180_000)
    assert page.evaluate("Boolean(window.isTheOldPage)") == in_place
    expect(page.locator("main[aria-busy=true]")).to_have_count(0)
    expect(page.locator("#news")).to_have_attribute("aria-busy", "false")


@pytest.mark.parametrize(
    "route",
    ["", *(pytest.param(page, marks=pytest.mark.nightly) for page in ("timeline?step=25", "stragglers", "buckets"))],
)
def test_no_picture_is_empty_or_half_built_while_a_page_is_followed(
    open_page: OpenPage, tmp_path: Path, route: str
) -> None:
    recording = write_live_recording(tmp_path / "traces")
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(url + route)
        page.wait_for_function("window.Bokeh?.documents[0]?.is_idle")
        # Drawing takes a while, as on a slow machine.
        page.route(LIBRARY, lambda route: (time.sleep(0.5), route.continue_()))
        grow(recording, tmp_path / "later", 60)
        expect(page.locator("#news")).to_contain_text("newer steps")
        page.evaluate("window.isTheOldPage = true")
        # As the page's script does when bucket sizes were still being tried while it was opened.
        page.evaluate("document.getElementById('worth')?.replaceChildren('as known meanwhile')")
        frames = Frames(page)
        follow(page)
        followed(page)
        expect(page.locator("main")).not_to_contain_text("as known meanwhile")
        page.wait_for_timeout(500)
        shares = frames.filled()
        assert len(shares) >= 2
        assert min(shares) > 0.8 * shares[0] > 0.01


SEEN = f"[document.getElementById('ranks').scrollTop, [{LANES}.x_range.start, {LANES}.x_range.end]]"


def open_banner_and_scroll(page: Page) -> None:
    page.locator(".banner summary").click()
    page.locator("#ranks").evaluate("(ranks) => ranks.scrollTo(0, 150)")


@pytest.mark.nightly
def test_scroll_open_details_selection_and_focus_stay(open_page: OpenPage, tmp_path: Path) -> None:
    recording = write_live_recording(tmp_path / "traces", ranks=RANKS, steps=10, close=False)
    (recording / "rank_1" / MACHINE_FILE).write_text("[]\n")  # so that there is something to say
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(f"{url}timeline?step=8")
        page.set_viewport_size(LOW_WINDOW)
        open_banner_and_scroll(page)
        grow(recording, tmp_path / "later", 20, close=False)
        expect(page.locator("#news")).to_contain_text("newer steps")
        page.evaluate("window.isTheOldPage = true")
        follow(page)
        followed(page)
        wait_for_step(page, 19)
        assert page.locator("#ranks").evaluate("(ranks) => ranks.scrollTop") == 150
        assert page.locator(".banner").evaluate("(banner) => banner.open")
        expect(page.locator("#news").get_by_label("Follow")).to_be_focused()
        page.locator("#search").fill("bucket 1")
        page.keyboard.press("Enter")
        expect(page.locator("#selection h2")).to_contain_text("bucket 1 of step 19")
        page.wait_for_function("new URLSearchParams(location.search).has('span')")
        expect(page.locator("#gutter .number[aria-expanded=true]")).to_have_count(1)
        rank = page.locator("#gutter .number").nth(12)
        rank.focus()
        [scrolled, view] = page.evaluate(SEEN)
        grow(recording, tmp_path / "latest", 30, close=False)
        page.wait_for_function("document.body.dataset.followed === '29'")
        followed(page)
        assert page.evaluate(SEEN) == [scrolled, view]
        expect(page.locator("#selection h2")).to_contain_text("bucket 1 of step 19")
        expect(rank).to_be_focused()
        expect(page.locator("#step")).to_have_attribute("max", "29")


@pytest.mark.nightly
def test_what_is_closed_and_scrolled_before_the_page_is_drawn_again_stays(open_page: OpenPage, tmp_path: Path) -> None:
    recording = write_live_recording(tmp_path / "traces", ranks=RANKS, steps=10, close=False)
    (recording / "rank_1" / MACHINE_FILE).write_text("[]\n")  # so that there is something to say
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(f"{url}timeline?step=8")
        page.set_viewport_size(LOW_WINDOW)
        page.wait_for_function("window.Bokeh?.documents[0]?.is_idle")
        open_banner_and_scroll(page)
        page.evaluate("window.isTheOldPage = true")
        page.add_init_script("""addEventListener("DOMContentLoaded", () => setTimeout(() => {
          const [banner, ranks] = [document.querySelector(".banner"), document.getElementById("ranks")]
          window.wasOpen = banner.open
          banner.open = false
          ranks.dispatchEvent(new WheelEvent("wheel", {bubbles: true}))
          ranks.scrollTo(0, 20)
        }))""")
        page.evaluate("overlapscope.reloadInPlace()")
        followed(page, in_place=False)
        page.evaluate("new Promise((drawn) => setTimeout(drawn, 200))")
        assert page.evaluate("window.wasOpen")
        assert not page.locator(".banner").evaluate("(banner) => banner.open")
        assert page.locator("#ranks").evaluate("(ranks) => ranks.scrollTop") == 20


def test_who_types_is_not_interrupted(open_page: OpenPage, tmp_path: Path) -> None:
    recording = write_live_recording(tmp_path / "traces")
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(f"{url}timeline?step=25")
        expect(page.locator("#news")).to_have_attribute("aria-busy", "false")
        page.evaluate("window.isTheOldPage = true")
        grow(recording, tmp_path / "later", 60)
        expect(page.locator("#news")).to_contain_text("newer steps")
        page.locator("#search").fill("bucket")
        follow(page)
        page.locator("#search").focus()
        for _ in range(4):
            with page.expect_response("**/news"):
                pass
        assert page.evaluate("window.isTheOldPage")
        expect(page.locator("#search")).to_have_value("bucket")
        page.locator("#search").blur()
        followed(page)
        wait_for_step(page, 59)


def test_a_click_reaches_the_page_before_its_plots_are_drawn(open_page: OpenPage, tmp_path: Path) -> None:
    recording = write_live_recording(tmp_path / "traces")
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(f"{url}timeline?step=25")
        page.wait_for_function("window.Bokeh?.documents[0]?.is_idle")
        held: list[Route] = []
        page.route(LIBRARY, lambda route: held.append(route))
        page.evaluate("window.isTheOldPage = true")
        page.evaluate("overlapscope.reloadInPlace()")
        page.wait_for_function("!window.isTheOldPage && document.readyState === 'interactive'")
        box = page.locator("#theme").bounding_box()
        assert box is not None
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        assert page.evaluate("([x, y]) => document.elementFromPoint(x, y).closest('#theme') !== null", middle)
        held[0].continue_()
        followed(page, in_place=False)


def test_who_follows_a_link_while_the_page_is_being_opened_again_is_led_there(
    open_page: OpenPage, tmp_path: Path
) -> None:
    """And no error is logged, which ``open_page`` asserts."""
    recording = write_recording(tmp_path / "traces", ranks=2, steps=30)
    with served(recording, tmp_path / "server.log") as url:
        page = open_page(f"{url}stragglers")
        page.evaluate("""() => {
          overlapscope.reloadInPlace()
          setTimeout(() => document.querySelector("nav a[href*=buckets]").click())
        }""")
        page.wait_for_url("**/buckets*")
        page.wait_for_function("window.Bokeh?.documents[0]?.is_idle")
