"""A served recording, and pages that may talk to nobody but this machine."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, WebSocket, expect, sync_playwright

from tests.browser.chromium import ARGUMENTS, CHROMIUM
from tests.browser.warm_servers import WarmServer
from tests.synthetic import write_recording

START_LIMIT_S = 60

expect.set_options(timeout=30_000)  # on a busy machine a page may take its time

OpenPage = Callable[..., Page]


@contextlib.contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of ``overlapscope serve`` over a folder, in a process that ends with the test."""
    server = WarmServer([str(folder), "--port", "0", "--no-browser", *options], log)
    try:
        until = time.monotonic() + START_LIMIT_S
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert server.is_running(), log.read_text()
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.05)
        yield found.group()
    finally:
        server.end(20)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A recording of two ranks and 30 steps."""
    folder = tmp_path_factory.mktemp("browser")
    with served(write_recording(folder / "traces", steps=30), folder / "server.log") as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages; the test fails if one of them logs an error or asks another host for anything."""
    wrong: list[str] = []

    def check(request: Request | WebSocket) -> None:
        if urlsplit(request.url).hostname not in ("localhost", "127.0.0.1", None):
            wrong.append(f"request to {request.url}")

    def note(said: ConsoleMessage) -> None:
        is_of_jupyterlab = "/lsp/status" in str(said.location)  # which asks now and then for servers that it lacks
        if said.type == "error" and not is_of_jupyterlab:
            wrong.append(f"{said.text} {said.location}")

    def opened(url: str, theme: str = "light") -> Page:
        page = browser.new_context(viewport={"width": 1300, "height": 800}, color_scheme=theme).new_page()  # type: ignore[arg-type]
        page.on("request", check)
        page.on("websocket", check)
        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url)
        return page

    yield opened
    seen = [*wrong]  # a server may be gone by now, which its pages notice when they are closed
    for context in browser.contexts:
        context.close()
    assert seen == []
