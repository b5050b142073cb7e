"""axe-core has nothing to say of any page: with all its rules, in either theme and in a narrow window."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage, served
from tests.browser.test_layout import ready
from tests.cli.command_line import overlapscope
from tests.dashboards.test_order_page import faulty
from tests.ordered import end, steps, write_order
from tests.synthetic import write_straggling_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RUN = "runs/whole/-/"
PAGES = ("", *(RUN + page for page in ("", "timeline", "order")))
"""The table of runs, and what most people see of a run."""
OTHER_PAGES = (
    *(RUN + page for page in ("buckets", "stragglers", "plots/timeline")),
    *("runs/faulty/-/order", "runs/faulty/-/stragglers", "runs/gone/-/"),
    *("docs/glossary", "compare?base=whole&new=faulty&new=gone"),
)
"""More pages of a run and a plot alone, a fault, two that say why there is nothing, and a document."""
FILES = ("report.html", "comparison.html")
COLOR_RULES = ("color-contrast", "link-in-text-block")
"""All of axe's that look at colors, which is what a theme changes."""
SIZE_RULES = ("scrollable-region-focusable",)
"""Those that it runs by default and that look at sizes, which is what a narrow window changes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a straggler and an order of collectives, another one, one with a fault, and files about them."""
    folder = tmp_path_factory.mktemp("axe") / "traces"
    for name, late_us in (("whole", 3_000), ("quicker", 2_000)):
        late = {1: late_us}
        write_straggling_recording(folder / name, late_us=lambda rank, _, of=late: of.get(rank, 0), ranks=3, steps=30)
    write_order(folder / "whole", dict.fromkeys(range(3), steps(30)))
    end(folder / "whole", range(3))
    faulty(folder / "faulty")
    report, comparison = (folder.parent / file for file in FILES)
    assert overlapscope("report", folder / "whole", "-o", report).returncode == 0
    comparison.write_text(overlapscope("compare", folder / "quicker", folder / "whole", "--format", "html").stdout)
    shutil.rmtree(folder / "quicker")
    return folder


@pytest.fixture(scope="module")
def table(folder: Path) -> Iterator[str]:
    with served(folder, folder.parent / "server.log") as url:
        yield url


Finding = tuple[str, str, str, list[Any], str]


def find(page: Page, theme: str, rules: Sequence[str] = ()) -> list[Finding]:
    """What axe finds in a theme, whatever it calls it; with all its rules unless some are given."""
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type] # one of its names
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    return [
        (page.url, theme, found["id"], node["target"], node["failureSummary"])
        for found in page.evaluate("(options) => axe.run(options)", options)["violations"]
        if found["impact"] in ("serious", "critical") or not re.search("timeline|^file:", page.url)
        for node in found["nodes"]
    ]


@pytest.mark.parametrize(
    ("pages", "files"),
    [(PAGES, FILES[:1]), pytest.param(OTHER_PAGES, FILES[1:], marks=pytest.mark.nightly)],
    ids=["what_is_seen_most", "others"],
)
def test_no_page_has_a_finding(
    open_page: OpenPage, table: str, folder: Path, pages: Sequence[str], files: Sequence[str]
) -> None:
    page = open_page(table)
    expect(page.locator("body")).to_have_attribute("data-ready", "yes")
    found = []
    for path in pages:
        if path:
            page.goto(table + path)
            expect(page.locator("main[aria-busy=true]")).to_have_count(0, timeout=60_000)
        if page.locator("[data-root-id]").count():
            ready(page)
        if path == f"{RUN}timeline":
            page.locator("#search").fill("bucket 1")
            page.keyboard.press("Enter")
            expect(page.locator("#selection")).to_be_visible()
        if page.locator(".save").count():
            page.locator(".save").last.click()
            expect(page.locator(".save-menu:popover-open")).to_be_visible()
        found += find(page, "light")
        if "timeline" in path:
            found += find(page, "dark", COLOR_RULES)
        else:
            page.set_viewport_size({"width": 390, "height": 800})
            page.wait_for_function("document.documentElement.clientWidth === 390")
            found += find(page, "dark", COLOR_RULES + SIZE_RULES)
            page.set_viewport_size({"width": 1300, "height": 800})
    for file in files:
        page.goto((folder.parent / file).as_uri())
        found += find(page, "light") + find(page, "dark", COLOR_RULES)
    assert found == []
