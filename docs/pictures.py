"""Take the pictures of README.md and of docs/, in Chromium and in the light theme, of real recordings made here.

    python docs/pictures.py [FOLDER]

Needs Chromium and `pip install -e '.[test]'`, and takes three minutes on an idle machine. Recordings go into FOLDER, or
into a temporary one; those that FOLDER holds already are not made again, so that pictures of pages that have changed
show the same runs. Look at each picture before you commit it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser.chromium import ARGUMENTS, CHROMIUM
from tests.browser.conftest import served
from tests.cluster.injected import CASES, train

DOCS: Final = Path(__file__).parent
WIDTH_PX: Final = 1460


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A page, and what of it is in the picture."""

    name: str
    served: str
    """A recording; empty for the folder of all."""
    address: str
    """Relative to that of the server."""
    ready: str
    """A selector of what is there once the page is complete."""
    height_px: int


PICTURES: Final = (
    Picture(name="timeline", served="gpt", address="timeline", ready="#status:has-text('in view')", height_px=648),
    Picture(
        name="overview",
        served="gpt",
        address="",
        ready="section:has-text('Recommended changes'):not(:has-text('being tried'))",
        height_px=900,
    ),
    Picture(name="buckets", served="gpt", address="buckets", ready=".bk-Figure", height_px=1000),
    Picture(name="order", served="mismatch", address="order", ready="body[data-answered]", height_px=800),
    Picture(name="stragglers", served="two-slow-ranks", address="stragglers", ready=".bk-Figure", height_px=835),
    Picture(
        name="compare", served="", address="compare?base=healthy&new=two-slow-ranks", ready=".waterfall", height_px=616
    ),
)


def record(folder: Path) -> None:
    """Record what is not there yet: a small GPT, a mismatch, and four ranks without and with two known faults.

    The compute of the four ranks is emulated, as ``tests/cluster/straggling.py`` says; all else of them is real.
    """
    command = [sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()"]
    if not (folder / "gpt").exists():
        subprocess.run([*command, "demo", "-o", str(folder / "gpt"), "--no-serve"], check=True)
    if not (folder / "mismatch").exists():
        subprocess.run([*command, "lab", "fault", "different-collectives", "-o", str(folder / "mismatch")], check=True)
    for name, case in (("healthy", "none"), ("two-slow-ranks", "slow_compute_and_slow_data")):
        if not (folder / name).exists():
            train(CASES[case], folder / name)


def take(browser: Browser, folder: Path, picture: Picture) -> None:
    """Take a picture into ``docs/``."""
    size = {"width": WIDTH_PX, "height": picture.height_px}
    page = browser.new_page(viewport=size, color_scheme="light")  # type: ignore[arg-type]
    with served(folder / picture.served, folder / "server.log") as url:
        page.goto(urljoin(url, picture.address))  # a run that failed is served at its Order
        page.wait_for_selector(picture.ready, timeout=120_000)
        page.wait_for_function("!window.Bokeh || window.Bokeh.documents.every((each) => each.is_idle)")
        page.wait_for_timeout(1_000)  # what is drawn is drawn a frame or two later
        page.screenshot(path=DOCS / f"{picture.name}.png")
        page.close()


def main() -> None:
    """Record, serve, and take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where recordings are, or go (default: a temporary one)")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="overlapscope-pictures-"))
    folder.mkdir(parents=True, exist_ok=True)
    record(folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        for picture in PICTURES:
            take(browser, folder, picture)
        browser.close()


if __name__ == "__main__":
    main()
