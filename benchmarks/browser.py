"""The app as it is, in a process of its own, and headless Chromium to look at it, which draws without a GPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from playwright.sync_api import Page, ViewportSize, sync_playwright

from tests.browser.chromium import ARGUMENTS, CHROMIUM
from tests.cluster.processes import METHOD

COUNT_FRAMES = """() => {
  const frames = window.framesMs = []
  let last = performance.now()
  const count = (now) => {
    if (window.framesMs !== frames) return // counting has begun anew
    frames.push(now - last)
    last = now
    requestAnimationFrame(count)
  }
  requestAnimationFrame(count)
}"""
"""Notes how long each frame of a page takes from now on."""


@dataclass(frozen=True)
class Server:
    """What ``overlapscope serve`` would have started."""

    url: str
    pid: int
    prepared_s: float
    """How long it took until it was ready."""

    @property
    def memory_gb(self) -> float:
        """Return its RSS, now."""
        return float(psutil.Process(self.pid).memory_info().rss) / 1e9


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serve a recording from when all is ready, as it is when ``overlapscope serve`` prints its address."""
    context = multiprocessing.get_context(METHOD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(folder, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        port, prepared_s = ours.recv()
        yield Server(f"http://127.0.0.1:{port}", process.pid, prepared_s)
    finally:
        process.terminate()
        process.join(10)


def _serve(folder: Path, pipe: Connection) -> None:
    from dashboards.app import prepare, start_server
    from dashboards.runs import RunIndex

    runs = RunIndex([folder])
    begin = time.monotonic()
    prepare(runs)
    seconds = time.monotonic() - begin
    server = start_server(runs, "127.0.0.1", 0)
    pipe.send((server.port, seconds))
    server.io_loop.start()


@contextmanager
def opened_page(script: str = "") -> Iterator[Page]:
    """Open a page of 1440×900 pixels.

    Args:
        script: runs first in whatever it shows.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport=ViewportSize(width=1440, height=900))
        page.add_init_script(script)
        yield page
        browser.close()
