"""How fast the stragglers page is with many ranks: until it is painted, and while its map is moved.

The recording is made up, as tables: hosts of eight ranks, steps of about 120 ms with four buckets, one rank that
computes 12 ms longer all the time, and one host whose forward takes 8 ms longer in the second half. The app runs as
it is, in a process of its own, and is looked at with headless Chromium on this machine, which draws without a GPU.

Painted is from the start of the navigation until Bokeh has drawn everything, of a server that is ready, as it is
when `overlapscope serve` prints its address. A frame is the time from one animation frame to the next while the wheel
zooms and the mouse drags.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
from playwright.sync_api import Page, sync_playwright

CHROMIUM_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
CHROMIUM_ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
MS = 1_000_000
RANKS_PER_HOST = 8
BUCKETS = 4
BUCKET_BYTES = 25 * 1024**2
TRANSFER_NS = 6 * MS

WATCH = """
const note = () => {
  if (!window.Bokeh?.documents?.[0]?.is_idle) return requestAnimationFrame(note)
  requestAnimationFrame(() => setTimeout(() => (window.paintedMs = performance.now())))
}
requestAnimationFrame(note)
"""
COUNT_FRAMES = """
window.framesMs = []
let last = performance.now()
const count = (now) => { window.framesMs.push(now - last); last = now; requestAnimationFrame(count) }
requestAnimationFrame(count)
"""


def make_times(ranks: int, steps: int) -> dict[str, Any]:
    """When everything happens, nanoseconds (steps, ranks), and of all-reduces (steps, ranks, buckets)."""
    rng = np.random.default_rng(0)

    def jittered(usual_ms: float) -> Any:
        return ((usual_ms + rng.normal(0, 0.01 * usual_ms, (steps, ranks)).clip(-1, 1)) * MS).astype(np.int64)

    data_ns, forward_ns, backward_ns, optimizer_ns = (jittered(usual_ms) for usual_ms in (2, 30, 70, 5))
    backward_ns[:, ranks // 3] += 12 * MS
    slow_host = ranks // RANKS_PER_HOST // 2
    forward_ns[steps // 2 :, slow_host * RANKS_PER_HOST : (slow_host + 1) * RANKS_PER_HOST] += 8 * MS
    begin, end = (np.zeros((steps, ranks), dtype=np.int64) for _ in range(2))
    launch = np.zeros((steps, ranks, BUCKETS), dtype=np.int64)
    reduced = np.zeros((steps, BUCKETS), dtype=np.int64)
    begin[0] = 1_000 * MS
    for step in range(steps):
        backward_begin = begin[step] + data_ns[step] + forward_ns[step]
        shares = np.arange(1, BUCKETS + 1) / BUCKETS
        launch[step] = backward_begin[:, None] + (backward_ns[step][:, None] * shares).astype(np.int64)
        free = 0
        for bucket, last_arrival in enumerate(launch[step].max(axis=0)):
            free = reduced[step, bucket] = max(free, last_arrival) + TRANSFER_NS + int(rng.exponential(0.2 * MS))
        end[step] = free + optimizer_ns[step]
        if step + 1 < steps:
            begin[step + 1] = end[step]
    forward = begin + data_ns
    backward = forward + forward_ns
    finalise, finalised = backward + backward_ns, np.repeat(reduced[:, -1:], ranks, axis=1)
    return {
        "phases": {
            "data_wait": (begin, forward),
            "forward": (forward, backward),
            "backward": (backward, finalise),
            "finalise": (finalise, finalised),
            "optimizer": (finalised, end),
        },
        "steps": (begin, end),
        "launch": launch,
        "reduced": reduced,
    }


def make_trace(ranks: int, steps: int) -> Any:
    """A recording as the reader gives it: rank by rank, step by step."""
    from overlapscope.trace.format import OPS
    from overlapscope.trace.reader import Trace
    from overlapscope.trace.tables import PHASE_NAMES

    times = make_times(ranks, steps)

    def by_rank(rows_a_step: int) -> dict[str, Any]:
        count = steps * rows_a_step
        return {
            "rank": np.repeat(np.arange(ranks), count),
            "step": np.tile(np.repeat(np.arange(steps), rows_a_step), ranks),
        }

    def columns(*parts: Any) -> Any:
        return np.stack(parts, axis=-1).swapaxes(0, 1).ravel()

    spans = times["phases"]
    phases = pd.DataFrame(by_rank(len(spans))).assign(
        model=0,
        phase=pd.Categorical.from_codes(
            np.tile([PHASE_NAMES.index(name) for name in spans], ranks * steps).astype(np.int8), list(PHASE_NAMES)
        ),
        start_ns=columns(*(start for start, _ in spans.values())),
        end_ns=columns(*(end for _, end in spans.values())),
        no_sync=False,
    )
    launch_ns = times["launch"].swapaxes(0, 1).ravel()
    count = len(launch_ns)
    collectives = pd.DataFrame(by_rank(BUCKETS)).assign(
        model=0,
        group=0,
        plan_epoch=0,
        plan_hash=0,
        bucket=np.tile(np.arange(BUCKETS), ranks * steps),
        op=pd.Categorical.from_codes(np.full(count, OPS.index("all_reduce"), dtype=np.int8), list(OPS)),
        dtype=pd.Categorical.from_codes(np.zeros(count, dtype=np.int8), ["float32"]),
        elements=BUCKET_BYTES // 4,
        bytes=BUCKET_BYTES,
        call_site=-1,
        ready_ns=pd.array(launch_ns, dtype="Int64"),
        launch_ns=launch_ns,
        start_ns=pd.array(launch_ns, dtype="Int64"),
        end_ns=pd.array(np.tile(times["reduced"].ravel(), ranks), dtype="Int64"),
        end_uncertainty_ns=0,
        start_is_bound=False,
    )
    begin, end = times["steps"]
    steps_table = pd.DataFrame(by_rank(1)).assign(start_ns=columns(begin), end_ns=columns(end))
    rank = np.arange(ranks)
    hosts = [f"node{number:03}" for number in rank // RANKS_PER_HOST]
    rank_table = pd.DataFrame(
        {"rank": rank, "host": hosts, "pid": 1, "device": "cpu", "clock": "same boot", "offset_ns": 0, "closed": True}
    )
    empty = {
        "gradients": ("rank", "model", "step", "plan_epoch", "parameter", "ready_ns"),
        "copies": ("rank", "model", "step", "plan_epoch", "bucket", "direction", "start_ns", "end_ns"),
        "incidents": ("rank", "step", "incident", "time_ns"),
        "pauses": ("rank", "step", "generation", "start_ns", "end_ns"),
        "plans": ("model", "plan_epoch", "plan_hash", "bucket", "parameter", "name", "bytes"),
        "call_sites": ("rank", "call_site", "file", "line", "function"),
    }
    tables = {name: pd.DataFrame({column: np.zeros(0, np.int64) for column in given}) for name, given in empty.items()}
    run = {"world_size": ranks, "backend": "gloo", "models": [{"class": "made up"}]}
    tables |= {"steps": steps_table, "phases": phases, "collectives": collectives, "ranks": rank_table}
    return Trace(path=Path(), run=run, problems=(), **tables)


def serve_recording(ranks: int, steps: int, pipe: Connection) -> None:
    """The server process: sends its port when all is ready, and how long that took; runs until it is ended."""
    from dashboards.app import prepare, start_server
    from dashboards.recording import Recording, Snapshot

    snapshot = Snapshot(make_trace(ranks, steps))
    recording = Recording(Path())
    recording.newest = lambda *_: snapshot  # type: ignore[method-assign]
    begin = time.monotonic()
    prepare(recording)
    seconds = time.monotonic() - begin
    server = start_server(recording, "127.0.0.1", 0)
    pipe.send((server.port, seconds))
    server.io_loop.start()


def opened_ms(page: Page, url: str) -> float:
    """How long a page takes until it is painted."""
    page.goto(url)
    page.wait_for_function("window.paintedMs", timeout=120_000)
    return float(page.evaluate("window.paintedMs"))


def frames_ms(page: Page, seconds: float) -> list[float]:
    """Frames while the wheel zooms in and out of the map, and while the mouse drags it."""
    box = page.locator("#heatmap").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.evaluate(COUNT_FRAMES)
    until, move = time.monotonic() + seconds / 2, 0
    while time.monotonic() < until:
        move += 1
        page.mouse.wheel(0, -40 if move % 80 < 50 else 40)
        page.wait_for_timeout(8)
    page.mouse.down()
    until = time.monotonic() + seconds / 2
    while time.monotonic() < until:
        move += 1
        page.mouse.move(x + 200 * np.sin(move / 20), y + 60 * np.cos(move / 30))
        page.wait_for_timeout(8)
    page.mouse.up()
    return list(page.evaluate("window.framesMs"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5, help="how often to open each page")
    parser.add_argument("--seconds", type=float, default=10, help="how long to move the map")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_recording, args=(args.ranks, args.steps, theirs), daemon=True)
    server.start()
    theirs.close()
    try:
        port, seconds = ours.recv()
        memory_gb = psutil.Process(server.pid).memory_info().rss / 1e9
        print(f"{args.ranks:,} ranks, {args.steps:,} steps: judged in {seconds:.1f} s, server RSS {memory_gb:.1f} GB")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM_ARGUMENTS)
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.add_init_script(WATCH)
            for route in ("", "stragglers", "stragglers?grouping=ranks"):
                times_s = [opened_ms(page, f"http://127.0.0.1:{port}/{route}") / 1e3 for _ in range(args.times)]
                each = ", ".join(f"{time_s:.2f}" for time_s in times_s)
                print(f"/{route}: painted in {np.median(times_s):.2f} s (median of {each})", flush=True)
            moved_ms = frames_ms(page, args.seconds)
            median_ms, p95_ms = np.percentile(moved_ms, [50, 95])
            print(f"frames while moving: median {median_ms:.1f} ms, p95 {p95_ms:.1f} ms, of {len(moved_ms)}")
            browser.close()
    finally:
        server.terminate()
        server.join(10)


if __name__ == "__main__":
    main()
