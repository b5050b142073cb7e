"""How quick everything is with many ranks: reading their logs, judging them, opening pages, moving the map.

The recording is made up by tests/simulated_job.py and written to disk as logs: hosts of eight ranks, steps of 42 ms
with four buckets, one rank that computes 12 % longer all the time, and one host whose forward takes 2 ms longer in the
second half. The app runs as it is, in a process of its own, and is looked at with headless Chromium on this machine,
which draws without a GPU.

Painted is from the start of the navigation until Bokeh has drawn everything, of a server that is ready, as it is
when `overlapscope serve` prints its address. A frame is the time from one animation frame to the next while the wheel
zooms and the mouse drags.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.browser import COUNT_FRAMES, opened_page, served
from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import describe_summary
from overlapscope.stragglers.text import describe
from overlapscope.trace.recording import read_trace
from tests.cluster.processes import METHOD
from tests.simulated_job import MS, Job, write_logs

WATCH = """
const note = () => {
  if (!window.Bokeh?.documents?.[0]?.is_idle) return requestAnimationFrame(note)
  requestAnimationFrame(() => setTimeout(() => (window.paintedMs = performance.now())))
}
requestAnimationFrame(note)
"""


def write_recording(folder: Path, ranks: int, steps: int) -> None:
    """Write a recording in a process of its own, whose memory is not that of the reader."""
    job = Job(ranks=ranks, steps=steps, noise=0.01)
    job.slow_down(ranks // 3, 0.12)
    host = ranks // job.ranks_per_host // 2
    job.local_ns["forward"][steps // 2 :, host * job.ranks_per_host : (host + 1) * job.ranks_per_host] += 2 * MS
    write_logs(job.run(), folder)


def judge(folder: Path) -> None:
    """Time reading and judging, as `overlapscope stragglers` does it."""
    for what in ("from logs", "from the cache"):
        begin = time.monotonic()
        trace = read_trace(folder)
        read_s, begin = time.monotonic() - begin, time.monotonic()
        analysis = Analysis(trace)
        summary = analysis.summary
        breakdown_s, begin = time.monotonic() - begin, time.monotonic()
        assert analysis.cycles is not None
        cycles_s, begin = time.monotonic() - begin, time.monotonic()
        assert analysis.stragglers is not None
        judged_s = time.monotonic() - begin
        print(f"read {what} in {read_s:.1f} s, divided into blocks in {breakdown_s:.1f} s", flush=True)
        print(f"arranged in cycles in {cycles_s:.1f} s, judged in {judged_s:.1f} s", flush=True)
    print(f"  {describe_summary(summary)}")
    for finding in analysis.stragglers.findings:
        print(f"  {describe(finding)}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB", flush=True)


def opened_ms(page: Page, url: str) -> float:
    """Measure how long a page takes until it is painted."""
    page.goto(url)
    page.wait_for_function("window.paintedMs", timeout=120_000)
    return float(page.evaluate("window.paintedMs"))


def frames_ms(page: Page, seconds: float) -> list[float]:
    """Measure frames while the wheel zooms in and out of the map, and while the mouse drags it."""
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
    context = multiprocessing.get_context(METHOD)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for step, arguments in ((write_recording, (folder, args.ranks, args.steps)), (judge, (folder,))):
            process = context.Process(target=step, args=arguments)
            process.start()
            process.join()
        look_at_pages(folder, args.times, args.seconds)


def look_at_pages(folder: Path, times: int, seconds: float) -> None:
    """Serve a recording and open its pages."""
    with served(folder) as server, opened_page(WATCH) as page:
        print(f"serve: ready after {server.prepared_s:.1f} s, RSS {server.memory_gb:.1f} GB")
        for route in ("", "stragglers", "stragglers?grouping=ranks", "timeline?step=500&rank=341"):
            times_s = [opened_ms(page, f"{server.url}/{route}") / 1e3 for _ in range(times)]
            each = ", ".join(f"{time_s:.2f}" for time_s in times_s)
            print(f"/{route}: painted in {np.median(times_s):.2f} s (median of {each})", flush=True)
        opened_ms(page, f"{server.url}/stragglers?grouping=ranks")
        moved_ms = frames_ms(page, seconds)
    median_ms, p95_ms = np.percentile(moved_ms, [50, 95])
    print(f"frames while moving: median {median_ms:.1f} ms, p95 {p95_ms:.1f} ms, of {len(moved_ms)}")


if __name__ == "__main__":
    main()
