"""How quick the app is, and how much memory it takes, with more ranks and with more users.

    python -m benchmarks.app [--sizes 2x50 64x200 1024x200] [--users 1 5 20]
    python -m benchmarks.app --sessions 50

Recordings are made up by tests/simulated_job.py and written to disk as logs. The app runs as it is, in a process of its
own, and is looked at with headless Chromium on this machine, which draws without a GPU and shares its processors.

Painted is from the start of the navigation until Bokeh has drawn everything, of a server that is ready. Every user has
a tab with the timeline, and all of them press the key for the next step at once; an answer is from the question until
the frame after its picture was drawn. With --sessions, pages are opened and closed one after the other, and the memory
of the server is looked at when it has dropped them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.browser import Server, opened_page, served
from benchmarks.thousand_ranks import write_recording
from benchmarks.timeline import WATCH, painted_s
from tests.cluster.processes import METHOD

PAGES: Final = ("", "timeline", "buckets", "stragglers", "order")
_FORGOTTEN_AFTER_S: Final = 75
"""The server drops what belongs to a closed page a minute after that."""


def browser_memory_gb() -> float:
    """Return what all processes of the browser take together, what they share counted once."""
    children = psutil.Process().children(recursive=True)
    return sum(child.memory_full_info().pss for child in children if "chrom" in child.name()) / 1e9


def answers_ms(pages: Sequence[Page], moves: int) -> list[float]:
    """Measure how long answers take if all users ask at once."""
    for page in pages:
        page.evaluate("window.answers = []")
    for _ in range(moves):
        for page in pages:
            page.keyboard.press("ArrowRight")
        for page in pages:
            page.wait_for_timeout(20)
    for page in pages:
        page.wait_for_function("window.answers.length", timeout=60_000)
    return [answer for page in pages for answer in page.evaluate("window.answers")]


def look(folder: Path, users: Sequence[int], moves: int) -> None:
    """Measure one recording."""
    with served(folder) as server:
        with opened_page(WATCH) as page:
            for route in PAGES:
                _, again_s = (painted(page, f"{server.url}/{route}") for _ in range(2))
                print(f"  /{route}: painted in {again_s:.2f} s", flush=True)
        for count in users:
            with opened_page(WATCH) as page:
                pages = [page, *(_another(page) for _ in range(count - 1))]
                for each in pages:
                    painted_s(each, f"{server.url}/timeline")
                p50, p95 = np.percentile(answers_ms(pages, moves), [50, 95])
                memory = f"server {server.memory_gb:.2f} GB, browser {browser_memory_gb():.2f} GB"
                print(f"  {count} users: answers p50 {p50:.0f} ms, p95 {p95:.0f} ms; {memory}", flush=True)


def painted(page: Page, url: str) -> float:
    """Measure how long a page takes until it is painted, one without a picture until it is loaded."""
    page.goto(url)
    page.wait_for_function("window.paintedMs || (document.readyState === 'complete' && !window.Bokeh)", timeout=120_000)
    return (
        float(page.evaluate("window.paintedMs ?? performance.timing.loadEventEnd - performance.timing.fetchStart"))
        / 1e3
    )


def _another(page: Page) -> Page:
    browser = page.context.browser
    assert browser is not None
    tab = browser.new_page(viewport=page.viewport_size)
    tab.add_init_script(WATCH)
    return tab


def open_and_close(server: Server, sessions: int) -> None:
    """Open and close many pages, one after the other; before memory is first looked at, each kind was open once."""
    with opened_page(WATCH) as page:
        for route in PAGES:
            painted(page, f"{server.url}/{route}")
        page.goto("about:blank")
        time.sleep(_FORGOTTEN_AFTER_S)
        before_gb = server.memory_gb
        for number in range(sessions):
            painted(page, f"{server.url}/{PAGES[number % len(PAGES)]}")
        page.goto("about:blank")
        most_gb = server.memory_gb
        time.sleep(_FORGOTTEN_AFTER_S)
        after_gb = server.memory_gb
    print(
        f"{sessions} pages opened and closed: server {before_gb:.3f} GB before, {most_gb:.3f} GB then, "
        f"{after_gb:.3f} GB after {_FORGOTTEN_AFTER_S} s ({100 * (after_gb / before_gb - 1):+.1f} %)"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["2x50", "64x200", "1024x200"], metavar="RANKSxSTEPS")
    parser.add_argument("--users", nargs="+", type=int, default=[1, 5, 20])
    parser.add_argument("--moves", type=int, default=20, help="how often each user goes to the next step")
    parser.add_argument("--sessions", type=int, default=0, help="open and close so many pages, and nothing else")
    args = parser.parse_args()
    for size in args.sizes[:1] if args.sessions else args.sizes:
        ranks, steps = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            writer = multiprocessing.get_context(METHOD).Process(target=write_recording, args=(folder, ranks, steps))
            writer.start()
            writer.join()
            print(f"{ranks} ranks, {steps} steps", flush=True)
            if args.sessions:
                with served(folder) as server:
                    open_and_close(server, args.sessions)
            else:
                look(folder, args.users, args.moves)


if __name__ == "__main__":
    main()
