"""How fast the timeline is with many spans: first paint, answers while dragging, memory of the server.

The app runs as it is, in a process of its own, and is looked at with headless Chromium on this machine, which draws
without a GPU. Spans are made up and enter as lanes: reading a recording of 10 million events takes its own time and
memory (its tables), and is not what is measured. Of the spans, a tenth are phases, half gradients, a quarter copies
and waits, and the rest collectives of which every second runs along with the one before.

First paint is from the start of the navigation until Bokeh has drawn everything. An answer is from the question for
a new view until the frame after its picture was drawn; it is measured while the mouse drags the time axis.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
from playwright.sync_api import Page, sync_playwright

CHROMIUM_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
CHROMIUM_ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
LANE_SHARES = {"phases": 0.1, "gradients": 0.5, "buckets": 0.25, "communication": 0.15}
SPAN_NS = 100_000

WATCH = """
window.answers = []
const note = () => {
  const doc = window.Bokeh?.documents?.[0]
  if (!doc?.is_idle) return requestAnimationFrame(note)
  window.paintedMs = performance.now()
  const [view, answer] = ["view", "answer"].map((name) => doc.get_model_by_name(name))
  const asked = new Map()
  view.properties.data.change.connect(() => asked.set(view.data.id[0], performance.now()))
  answer.properties.data.change.connect(() => {
    const id = answer.data.id[0]
    // Bokeh draws in the next frame; a task queued from there runs when it is done.
    requestAnimationFrame(() => setTimeout(() => window.answers.push(performance.now() - asked.get(id))))
  })
}
requestAnimationFrame(note)
"""


def make_lanes(spans: int, ranks: int) -> Any:
    """Lanes of a long, busy run."""
    from overlapscope.analysis.density import index_spans
    from overlapscope.analysis.lanes import BUCKET_SLOTS, LANE_NAMES, Lane, Timeline, bucket_categories

    rng = np.random.default_rng(0)
    length_ns = int(spans * LANE_SHARES["phases"] / ranks * SPAN_NS)
    lanes = []
    for rank in range(ranks):
        for name in LANE_NAMES:
            count = int(spans * LANE_SHARES[name] / ranks)
            pitch_ns = length_ns // count
            starts_ns = np.arange(count) * pitch_ns + rng.integers(0, max(1, pitch_ns // 4), count)
            lengths = {"gradients": (0, 0), "communication": (1.3, 0.6)}.get(name, (0.7, 0.7))
            ends_ns = starts_ns + (np.resize(lengths, count) * pitch_ns).astype(np.int64)
            categories = (
                np.arange(count) % 6 if name == "phases" else bucket_categories(np.arange(count) % BUCKET_SLOTS)
            )
            lanes.append(
                Lane(rank=rank, name=name, spans=index_spans(starts_ns, ends_ns, categories, np.arange(count)))
            )
    begins_ns = np.arange(0, length_ns, 5 * SPAN_NS)
    steps = pd.DataFrame({"step": np.arange(len(begins_ns)), "start_ns": begins_ns, "end_ns": begins_ns + 5 * SPAN_NS})
    unfinished = pd.DataFrame(
        {name: np.zeros(0, dtype=np.int64) for name in ("lane", "row", "start_ns", "end_ns", "bucket")}
    )
    return Timeline(lanes=tuple(lanes), begin_ns=0, length_ns=length_ns, steps=steps, unfinished=unfinished)


def serve_lanes(spans: int, ranks: int, pipe: Connection) -> None:
    """The server process: sends its port and runs until it is ended."""
    from dashboards.app import start_server
    from dashboards.recording import Recording

    timeline = make_lanes(spans, ranks)
    collectives = pd.DataFrame({"bucket": np.arange(int(spans * LANE_SHARES["communication"])) % 8})
    known = pd.DataFrame({"rank": range(ranks), "host": "node0"})
    trace = SimpleNamespace(collectives=collectives, ranks=known, problems=(), run={})
    lanes = SimpleNamespace(timeline=lambda _ranks: timeline)
    recording = Recording(Path())
    recording.newest = lambda: SimpleNamespace(trace=trace, lanes=lanes)  # type: ignore[assignment,return-value]
    server = start_server(recording, "127.0.0.1", 0)
    pipe.send(server.port)
    server.io_loop.start()


def measure(spans: int, ranks: int, seconds: float) -> list[tuple[str, ...]]:
    """Rows of the table for one number of spans."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_lanes, args=(spans, ranks, theirs), daemon=True)
    server.start()
    theirs.close()
    rows = []
    try:
        url = f"http://127.0.0.1:{ours.recv()}/timeline"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM_ARGUMENTS)
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.add_init_script(WATCH)
            page.goto(url)
            page.wait_for_function("window.paintedMs", timeout=30_000)
            # Opened again: the first page of a server pays for imports and caches.
            first_ms = page.evaluate("window.paintedMs")
            page.goto(url)
            page.wait_for_function("window.paintedMs", timeout=30_000)
            paint = f"{first_ms / 1000:.2f} / {page.evaluate('window.paintedMs') / 1000:.2f} s"
            for label, key_presses in (("a third", 5), ("a thirtieth", 10), ("single spans", None)):
                answers_ms = drag(page, key_presses, seconds)
                status = page.text_content("#status") or ""
                median, p95 = np.percentile(answers_ms, [50, 95])
                rss_gb = psutil.Process(server.pid).memory_info().rss / 1e9
                in_view = status.split(" span")[0]
                times = (f"{median:.0f} ms", f"{p95:.0f} ms", f"{len(answers_ms)}")
                rows.append((f"{spans:,}", paint, label, in_view, *times, f"{rss_gb:.2f} GB"))
                paint = ""
            browser.close()
    finally:
        server.terminate()
        server.join(10)
    return rows


def drag(page: Page, key_presses: int | None, seconds: float) -> list[float]:
    """Zoom in with the keyboard, to single spans if no number is given, then drag for some time."""
    presses = 0
    while presses < (200 if key_presses is None else key_presses):
        if key_presses is None and "Zoom in" not in (page.text_content("#status") or ""):
            break
        page.keyboard.press("w")
        page.wait_for_timeout(150)
        presses += 1
    page.wait_for_timeout(1000)
    page.evaluate("window.answers = []")
    page.mouse.move(800, 122)
    page.mouse.down()
    until, move = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        move += 1
        page.mouse.move(800 + 300 * np.sin(move / 40), 122)
        page.wait_for_timeout(8)
    page.mouse.up()
    page.wait_for_timeout(500)
    return list(page.evaluate("window.answers"))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5, help="how long to drag at each zoom")
    args = parser.parse_args()
    headings = ("spans", "first paint, again", "zoomed to", "in view", "median", "p95", "answers", "server RSS")
    print("".join(f"{heading:>20}" for heading in headings))
    for spans in args.spans:
        for row in measure(spans, args.ranks, args.seconds):
            print("".join(f"{cell:>20}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
