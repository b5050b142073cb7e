"""A page of a recording that goes on for hours, and a user who clicks at random: errors, and memory over time.

    python -m benchmarks.live_app [--hours 4] [--seconds 600] [--ranks 2]

A process writes the recording with the real writer: first what has gone before, then ten steps a second. The app runs
as it is, in a process of its own, and is looked at with headless Chromium on this machine. The user clicks links,
buttons and pictures, presses keys, zooms, goes back, and follows, as a seed has it. Printed are how long pages took to
open, the memory of the server and of the browser every tenth of the time, and everything that went wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import numpy as np
from playwright.sync_api import ConsoleMessage, Error, Page, Request

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.app import PAGES, browser_memory_gb
from benchmarks.browser import opened_page, served
from overlapscope.trace import clocks
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import RANK_FILE, rank_folder
from tests.cluster.processes import METHOD
from tests.synthetic import make_rank, write_step

STEPS_PER_S: Final = 10
_STEP_NS: Final = 1_000_000_000 // STEPS_PER_S
_KEYS: Final = (
    "ArrowRight",
    "ArrowLeft",
    "w",
    "s",
    "a",
    "d",
    "f",
    "c",
    "?",
    "Escape",
    "/",
    "Home",
    "End",
    "+",
    "-",
    "0",
)


def record(folder: Path, ranks: int, hours: float, is_ready: Event) -> None:
    """Write a recording of this process that goes on."""
    logs = [make_rank(folder, rank, world_size=ranks) for rank in range(ranks)]
    here = {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": clocks.get_boot_id(), "device": "cpu"}
    for rank in range(ranks):
        write_json(rank_folder(folder, rank) / RANK_FILE, {"rank": rank, "clock_samples": [], **here})
    steps_before = int(hours * 3600 * STEPS_PER_S)
    begin_ns = clocks.host_now_ns() - steps_before * _STEP_NS
    step = 0
    while True:
        if step == steps_before:
            is_ready.set()
        ends_ns = begin_ns + (step + 1) * _STEP_NS
        if step >= steps_before:
            time.sleep(max(0.0, (ends_ns - clocks.host_now_ns()) / 1e9))
        for log in logs:
            log.reserve()
            write_step(log, step, ends_ns - 10_000_000)
        step += 1


class User:
    """Clicks at random.

    Args:
        page: is blank.
        url: of the app.
        seed: of what is done.
    """

    def __init__(self, page: Page, url: str, seed: int) -> None:
        self.wrong: list[str] = []
        self.opened_s: list[float] = []
        self._page, self._url, self._random = page, url, random.Random(seed)
        self._last = ""
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self._note(f"exception: {error}"))
        page.on("requestfailed", self._miss)

    def open_page(self) -> None:
        """Open one of the pages, and measure how long that takes."""
        begin_s = time.monotonic()
        self._page.goto(f"{self._url}/{self._random.choice(PAGES)}")
        self._page.wait_for_function("!window.Bokeh || window.Bokeh.documents?.[0]?.is_idle", timeout=60_000)
        self.opened_s.append(time.monotonic() - begin_s)

    def act(self) -> None:
        """Do anything."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (1, self.open_page),
            (6, self._click_control),
            (6, self._click_anywhere),
            (6, lambda: self._page.keyboard.press(self._random.choice(_KEYS))),
            (3, lambda: self._page.mouse.wheel(0, self._random.choice((-240, 240)))),
            (1, lambda: self._go_back()),
        ]
        act = self._random.choices([act for _, act in acts], [weight for weight, _ in acts])[0]
        try:
            act()
        except Error as error:  # what was about to be clicked may have gone
            if "Timeout" not in str(error) and "detached" not in str(error) and "navigat" not in str(error):
                self._note(str(error))
        self._page.wait_for_timeout(self._random.choice((50, 200, 1000)))

    def _click_control(self) -> None:
        controls = self._page.locator("a:visible, button:visible, select:visible, input:visible, summary:visible")
        if count := controls.count():
            control = controls.nth(self._random.randrange(count))
            self._last = control.evaluate("it => it.outerHTML.slice(0, 120)")
            control.click(timeout=2000)

    def _click_anywhere(self) -> None:
        self._page.mouse.click(self._random.randrange(20, 1420), self._random.randrange(60, 880))

    def _go_back(self) -> None:
        self._page.go_back(timeout=20_000)
        if not self._page.url.startswith(self._url):
            self.open_page()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._note(f"console: {message.text}")

    def _miss(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # by going to another page
            self._note(f"request: {request.url} {request.failure}")

    def _note(self, what: str) -> None:
        self.wrong.append(f"{what} (after {self._last})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=4.0, help="that the recording has gone on for")
    parser.add_argument("--seconds", type=float, default=600.0, help="that the user clicks for")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    context = multiprocessing.get_context(METHOD)
    is_ready = context.Event()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "traces"
        recorder = context.Process(target=record, args=(folder, args.ranks, args.hours, is_ready), daemon=True)
        recorder.start()
        is_ready.wait()
        print(f"recording for {args.hours:g} h, seed {args.seed}", flush=True)
        try:
            with served(folder) as server, opened_page() as page:
                user = User(page, server.url, args.seed)
                user.open_page()
                memory_gb = []
                for part in range(10):
                    until_s = time.monotonic() + args.seconds / 10
                    while time.monotonic() < until_s:
                        user.act()
                    memory_gb.append(server.memory_gb)
                    minutes = (part + 1) * args.seconds / 600
                    memory = f"server {memory_gb[-1]:.2f} GB, browser {browser_memory_gb():.2f} GB"
                    print(f"{minutes:5.1f} min: {memory}, {len(user.wrong)} errors", flush=True)
        finally:
            recorder.terminate()
            recorder.join()
    print(f"pages opened in {np.median(user.opened_s):.2f} s (median of {len(user.opened_s)})")
    for what in dict.fromkeys(user.wrong):
        print(f"wrong: {what}")


if __name__ == "__main__":
    main()
