"""How fast the page of bucket sizes answers its slider.

    python benchmarks/bucket_page.py traces/

The app runs as it is, in a process of its own, with a real recording, and is looked at with headless Chromium on this
machine, which draws without a GPU. An answer is from the slider's move until the frame after the predicted step was
drawn. The slider goes to and fro over all sizes, and waits for each answer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import numpy as np
from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.browser import opened_page, served

MOVE: Final = """
(share) => new Promise((resolve) => {
  const slider = document.querySelector("#size")
  const [low, high] = [Number(slider.min), Number(slider.max)]
  const began = performance.now()
  const observer = new MutationObserver(() => {
    observer.disconnect()
    // Bokeh draws in the next frame; a task queued from there runs when it is done.
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)))
  })
  observer.observe(document.body, { attributeFilter: ["data-answered"] })
  slider.value = low + share * (high - low)
  slider.dispatchEvent(new Event("input", { bubbles: true }))
})
"""


def answers_ms(page: Page, moves: int) -> list[float]:
    """Measure how long each move of the slider took to be answered."""
    shares = 0.5 + 0.5 * np.sin(np.arange(moves) * 0.37)
    return [float(page.evaluate(MOVE, float(share))) for share in shares]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a recording")
    parser.add_argument("--moves", type=int, default=100, help="of the slider (default: 100)")
    args = parser.parse_args()
    with served(args.folder) as server, opened_page() as page:
        page.goto(f"{server.url}/buckets")
        page.wait_for_function("document.body.dataset.answered > 0", timeout=60_000)
        seen_ms = answers_ms(page, args.moves)
    median, p95 = np.percentile(seen_ms, [50, 95])
    print(f"{args.moves} moves of the slider: median {median:.0f} ms, p95 {p95:.0f} ms, longest {max(seen_ms):.0f} ms")


if __name__ == "__main__":
    main()
