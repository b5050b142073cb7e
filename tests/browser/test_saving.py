"""What people save from the pages of a run: pictures of its figures as they are in view, and its tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from dashboards.recording import RecordingCache
from dashboards.saving import steps_table
from dashboards.theme import ThemeName, ink
from tests.browser.conftest import OpenPage, served
from tests.browser.test_layout import ready
from tests.ordered import end, steps, write_order
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MARGIN_PX = 12
CAPTION_PX = 22
TEXTS = {
    "": {"breakdown": "forward", "step-time": "Step time", "exposed": "range of the ranks", "overlap-ratio": "100 %"},
    "timeline": {"breakdown": "Mean of all ranks", "timeline": "rank 2"},
    "buckets": {"breakdown": "Predicted", "sizes": "best size", "steps": "A step as it was, and as it would be"},
    "stragglers": {"breakdown": "All-reduces at their best", "ranks-by-step": "Lateness"},
    "order": {"order": "bucket 1", "breakdown": "Mean of all ranks"},
}
"""By page, the name of each of its figures, and a text in it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving") / "traces"
    write_recording(folder / "night" / "run 1", ranks=3, steps=30)
    write_order(folder / "night" / "run 1", dict.fromkeys(range(3), steps(30)))
    end(folder / "night" / "run 1", range(3))
    write_recording(folder / "other", ranks=1, steps=5)
    return folder


@pytest.fixture(scope="module")
def table(folder: Path) -> Iterator[str]:
    with served(folder, folder.parent / "server.log") as url:
        yield url


def menu_of(page: Page, item: str) -> Locator:
    """The menu that has an item, opened by keyboard."""
    menu = page.locator(".save-menu").filter(has=page.locator(item)).first
    button = page.locator(f"[popovertarget='{menu.get_attribute('id')}']")
    button.scroll_into_view_if_needed()
    button.focus()
    page.keyboard.press("Enter")
    expect(menu).to_be_visible()
    return menu


def saved(page: Page, item: str, into: Path) -> Path:
    with page.expect_download() as download:
        menu_of(page, item).locator(item).press("Enter")
    download.value.save_as(into / download.value.suggested_filename)
    return into / download.value.suggested_filename


def size_of(page: Page, figure: str) -> tuple[int, int]:
    return tuple(
        page.evaluate(
            """([figure, margin, caption]) => {
              const parts = [...document.querySelectorAll(`[data-figure="${figure}"]`)]
              const boxes = parts.map((part) => part.getBoundingClientRect())
              const length = (begin, end) =>
                Math.max(...boxes.map((box) => box[end])) - Math.min(...boxes.map((box) => box[begin]))
              const [width, height] = [length("left", "right"), length("top", "bottom")]
              return [Math.ceil(width + 2 * margin), Math.ceil(height + 2 * margin + caption)]
            }""",
            [figure, MARGIN_PX, CAPTION_PX],
        )
    )


def rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[at : at + 2], 16) for at in (1, 3, 5))


@pytest.mark.parametrize(
    ("path", "theme"),
    [
        *(("", "light"), ("timeline", "dark")),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("stragglers", "light"), ("", "dark"), ("order", "light"), ("buckets", "light"))
        ),
    ],
)
def test_every_figure_is_saved_as_it_is_seen(
    open_page: OpenPage, table: str, tmp_path: Path, path: str, theme: ThemeName
) -> None:
    page = ready(open_page(f"{table}runs/night/run%201/-/{path}", theme))
    if path in ("timeline", "order"):
        expect(page.locator("#step")).to_have_value("16" if path == "timeline" else "29")
    figures = page.locator("[data-save=png]").evaluate_all("(them) => them.map((it) => it.dataset.name)")
    assert figures == [*TEXTS[path]]
    for figure, text in TEXTS[path].items():
        picture = saved(page, f"[data-save=png][data-name={figure}]", tmp_path)
        step = {"timeline": "-step-16", "order": "-step-29", "steps": "-step-2"}.get(
            figure if path == "buckets" else path, ""
        )
        own = f"-{figure}" if figure != path else ""
        assert picture.name == f"overlapscope-night-run-1-{path or 'overview'}{own}{step}.png"
        image = Image.open(picture).convert("RGB")
        assert image.size == size_of(page, figure)
        assert image.getpixel((2, 2)) == rgb(ink(theme)["page"])
        inside = image.crop((MARGIN_PX + 2, MARGIN_PX + 2, image.width - MARGIN_PX, image.height - MARGIN_PX))
        colors = inside.getcolors(inside.width * inside.height)
        assert len(colors) > 20, "spans, and letters with soft edges"
        assert {rgb(ink(theme)["page"]), rgb(ink(theme)["surface"])} & {color for _, color in colors}

        drawing = ElementTree.parse(saved(page, f"[data-save=svg][data-name={figure}]", tmp_path)).getroot()
        assert (int(drawing.attrib["width"]), int(drawing.attrib["height"])) == image.size
        texts = [str(each.text) for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
        assert text in " ".join(texts)
        assert "run 1" in texts[0], "the caption names the run"
        assert not step or step.removeprefix("-").replace("-", " ") in texts[0]


@pytest.mark.nightly
def test_every_table_on_every_page_is_at_its_address_and_a_click_saves_it(
    open_page: OpenPage, folder: Path, table: str, tmp_path: Path
) -> None:
    frame = steps_table(RecordingCache(folder / "night" / "run 1").latest().summary)
    for path in ("", *(f"runs/night/run%201/-/{path}" for path in TEXTS)):
        page = open_page(table + path)
        expect(page.locator(".save").first).to_be_visible()
        addresses = page.locator(".save-menu a").evaluate_all("(links) => links.map((link) => link.href)")
        assert addresses
        for address in dict.fromkeys(addresses):
            answer = page.request.get(address)
            assert answer.status == 200, address
            assert len(answer.body()) > 20
        if path.endswith("-/"):
            file = saved(page, "a[href='tables/steps.csv']", tmp_path)
            assert file.name == "overlapscope-night-run-1-steps.csv"
            rows = list(csv.DictReader(file.open()))
            assert [int(row["step_time_ns"]) for row in rows] == frame["step_time_ns"].tolist()
            parquet = saved(page, "a[href='tables/steps.parquet']", tmp_path)
            pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(parquet.read_bytes())), frame)
            page.emulate_media(media="print")
            expect(page.locator(".save").first).to_be_hidden()
            page.emulate_media(media="screen")
            menu_of(page, "a")
            page.keyboard.press("Escape")
            expect(page.locator(".save-menu:popover-open")).to_have_count(0)
        page.close()
