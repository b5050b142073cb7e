"""How fast the timeline is with many spans: first paint, answers while dragging, memory of the server.

The recording is made up by tests/synthetic.py and written to disk with the real writer. The app runs as it is, in a
process of its own, and is looked at with headless Chromium on this machine, which draws without a GPU.

First paint is from the start of the navigation until Bokeh has drawn everything. An answer is from the question for
a new view until the frame after its picture was drawn; it is measured while the mouse drags the time axis, and while
ranks are scrolled. So are the frames of the page, which is moved at once by what it has: their number in a second, and
the longest but 5 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.browser import COUNT_FRAMES, opened_page, served
from overlapscope.trace.schema import RECORD_BYTES
from tests.synthetic import write_recording

SPANS_OF_A_STEP: Final = 20
"""On one rank: 5 phases, 3 gradients, 9 copies and waits, 3 collectives."""
MAX_BYTES_OF_A_STEP: Final = 32 * RECORD_BYTES
MIN_STEPS: Final = 10

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

# Far enough for the page to ask for other ranks.
CAN_SCROLL = "document.getElementById('ranks').scrollHeight > 2 * document.getElementById('ranks').clientHeight"
SCROLL = "(px) => { document.getElementById('ranks').scrollTop += px }"


def measure(spans: int, ranks: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table for one number of spans."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, steps = Path(temporary), max(MIN_STEPS, spans // SPANS_OF_A_STEP // ranks)
        spans = ranks * steps * SPANS_OF_A_STEP
        write_recording(folder, ranks=ranks, steps=steps, limit_bytes=steps * MAX_BYTES_OF_A_STEP)
        with served(folder) as server, opened_page(WATCH) as page:
            # Opened twice: the first page of a server pays for imports and caches.
            first_s, again_s = (painted_s(page, f"{server.url}/timeline") for _ in range(2))
            paint = f"{first_s:.2f} / {again_s:.2f} s"
            movements = [("a third", 5, drag), ("a thirtieth", 10, drag), ("single spans", None, drag)]
            if page.evaluate(CAN_SCROLL):
                movements.append(("ranks, scrolled", 0, scroll))
            for label, key_presses, move in movements:
                zoom_in(page, key_presses)
                answers_ms, frames_ms = move(page, seconds)
                in_view = (page.text_content("#status") or "").split(" span")[0]
                median, p95 = np.percentile(answers_ms, [50, 95])
                times = (f"{median:.0f} ms", f"{p95:.0f} ms", f"{len(answers_ms)}")
                frames = (f"{1e3 / np.mean(frames_ms):.0f}", f"{np.percentile(frames_ms, 95):.0f} ms")
                yield (
                    f"{ranks * steps * SPANS_OF_A_STEP:,}",
                    paint,
                    label,
                    in_view,
                    *times,
                    *frames,
                    f"{server.memory_gb:.2f} GB",
                )
                paint = ""


def painted_s(page: Page, url: str) -> float:
    """Measure how long a page takes until it is painted."""
    page.goto(url)
    page.wait_for_function("window.paintedMs", timeout=30_000)
    return float(page.evaluate("window.paintedMs")) / 1e3


def zoom_in(page: Page, key_presses: int | None) -> None:
    """Zoom in with the keyboard, to single spans if no number is given."""
    presses = 0
    while presses < (200 if key_presses is None else key_presses):
        if key_presses is None and "Zoom in" not in (page.text_content("#status") or ""):
            break
        page.keyboard.press("w")
        page.wait_for_timeout(150)
        presses += 1
    page.wait_for_timeout(1000)


def drag(page: Page, seconds: float) -> tuple[list[float], list[float]]:
    """Drag the time axis for some time; return what ``watch`` does."""
    lanes = page.locator("#lanes").bounding_box()
    assert lanes is not None
    y = lanes["y"] + 20
    page.mouse.move(800, y)
    page.mouse.down()
    times = watch(page, seconds, lambda move: page.mouse.move(800 + 300 * np.sin(move / 40), y))
    page.mouse.up()
    return times


def scroll(page: Page, seconds: float) -> tuple[list[float], list[float]]:
    """Scroll the ranks for some time; return what ``watch`` does."""
    return watch(page, seconds, lambda move: page.evaluate(SCROLL, 24 if move % 400 < 200 else -24))


def watch(page: Page, seconds: float, act: Callable[[int], None]) -> tuple[list[float], list[float]]:
    """Move a page for some time.

    Returns:
        How long answers took, and frames of the page, in milliseconds.
    """
    page.evaluate("window.answers = []")
    page.evaluate(COUNT_FRAMES)
    until, move = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        move += 1
        act(move)
        page.wait_for_timeout(8)
    frames_ms = list(page.evaluate("window.framesMs"))
    page.wait_for_timeout(500)
    page.wait_for_function("window.answers.length")  # on a busy machine the first one comes late
    return list(page.evaluate("window.answers")), frames_ms


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5, help="how long to drag at each zoom")
    args = parser.parse_args()
    headings = ("spans", "first paint, again", "zoomed to", "in view", "median", "p95", "answers", "frames a s", "p95")
    print("".join(f"{heading:>20}" for heading in (*headings, "server RSS")))
    for spans in args.spans:
        for row in measure(spans, args.ranks, args.seconds):
            print("".join(f"{cell:>20}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
