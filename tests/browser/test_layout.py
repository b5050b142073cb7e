"""How pages are laid out: in narrow windows, on paper, and while somebody points at them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from tests.browser.conftest import OpenPage, served
from tests.ordered import end, steps, write_order
from tests.synthetic import write_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = ("", "timeline", "buckets", "stragglers", "order")

CUT = """() => [...document.querySelectorAll(".facts span, .panel, .headlines div, dt, .trend, .rank, td, th")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1 || box.getBoundingClientRect().right > innerWidth)
  .map((box) => `${box.className || box.tagName}: ${box.textContent.trim().slice(0, 60)}`)"""
"""What is wider than its box, or ends outside the window."""

HIDDEN_FACTS = """() => [...document.querySelectorAll(".facts span")].filter((fact) => {
  const {right, top, bottom} = fact.getBoundingClientRect()
  return document.elementFromPoint(right - 2, (top + bottom) / 2) !== fact.lastElementChild
}).map((fact) => fact.textContent)"""
"""Facts of the run whose end is not to be seen."""


BOXES = """() => [...document.querySelectorAll(".rank")].map((rank) =>
  [rank, ...document.querySelectorAll("#lanes, .axis")].map((each) => each.getBoundingClientRect()))"""
"""Where the name of each rank is, and the lanes and the axis of all of them."""


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A recording with steps and an order of collectives, of three ranks, in a folder of recordings."""
    folder = tmp_path_factory.mktemp("layout")
    recording = folder / "traces" / "ordered"
    write_recording(recording, ranks=3, steps=30)
    write_order(recording, dict.fromkeys(range(3), steps(30)))
    end(recording, range(3))
    with served(folder / "traces", folder / "server.log") as url:
        yield f"{url}runs/ordered/-/"


def settled(page: Page, question: str) -> list[str]:
    """What a question finds; if it finds nothing once a page has been laid out again, nothing."""
    with contextlib.suppress(PlaywrightTimeoutError):
        page.wait_for_function(f"({question})().length === 0", timeout=5000)
        return []
    return page.evaluate(question)


def ready(page: Page) -> Page:
    page.wait_for_function("window.Bokeh?.documents[0]?.is_idle")
    return page


@pytest.mark.parametrize(
    "path",
    [
        *("", "timeline", "stragglers", "order"),
        *(pytest.param(path, marks=pytest.mark.nightly) for path in ("buckets", "buckets?plan=present")),
    ],
)
def test_nothing_is_cut_off_and_nothing_is_beside_or_below_the_page(
    open_page: OpenPage, ordered: str, path: str
) -> None:
    page = ready(open_page(ordered + path))
    for width in (1440, 1250, 800, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"document.documentElement.clientWidth === {width}")
        assert settled(page, f"() => [document.documentElement.scrollWidth].filter((wide) => wide !== {width})") == []
        if path == "timeline":
            assert page.evaluate("document.documentElement.scrollHeight") == 900  # it fills the window
        if width >= 800:
            assert settled(page, CUT) == []
            assert settled(page, HIDDEN_FACTS) == []


def test_a_narrow_time_axis_has_fewer_labels(open_page: OpenPage, ordered: str) -> None:
    page = ready(open_page(f"{ordered}timeline"))
    ticks = """Bokeh.documents[0].get_model_by_name("axis").above[0].ticker.desired_num_ticks"""
    page.wait_for_function(f"{ticks} === 10")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function(f"{ticks} < 5")


@pytest.mark.parametrize("path", [*PAGES[:2], *(pytest.param(path, marks=pytest.mark.nightly) for path in PAGES[2:])])
def test_on_paper_a_page_goes_on_to_its_end_and_nothing_is_cut_off_at_the_right(
    open_page: OpenPage, ordered: str, path: str
) -> None:
    """Plots are as wide as they were in the window: there is no time to draw them anew."""
    page = ready(open_page(ordered + path))
    figures = "[...document.querySelectorAll('[data-root-id] > *')].map((figure) => figure.getBoundingClientRect())"
    window = page.evaluate(figures)
    if path != "timeline":
        assert page.evaluate("document.documentElement.scrollHeight > innerHeight + 100")
        page.emulate_media(media="print")
        assert page.pdf(width="718px", height="300px").count(b"/Type /Page\n") >= 2
        page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    paper = page.evaluate(figures)
    assert len(paper) >= 1 or path == ""
    for before, after in zip(window, paper, strict=True):
        assert after["right"] <= 718 + 1
        assert -1 <= after["width"] - before["width"] * 718 / 1300 <= 9  # there is no scroll bar
    # At this zoom a dot of the paper is nearly two pixels of the page, and plots are rounded to dots.
    assert page.evaluate(CUT.replace("innerWidth", "719").replace("clientWidth + 1", "clientWidth + 2")) == []


def test_on_light_paper_the_lanes_stay_beside_their_names_and_below_their_axis(
    open_page: OpenPage, ordered: str
) -> None:
    page = ready(open_page(f"{ordered}timeline", "dark"))
    page.emulate_media(media="print")
    page.wait_for_function(f"""({BOXES})().every(([name, axis, lanes]) =>
      name.top < lanes.bottom && name.right <= lanes.left + 1 && Math.abs(axis.right - lanes.right) <= 1)""")
    expect(page.locator(".tools")).to_be_hidden()
    for event, theme in (("beforeprint", "light"), ("afterprint", "dark")):
        page.evaluate(f"dispatchEvent(new Event('{event}'))")
        expect(page.locator("html")).to_have_attribute("data-theme", theme)


def test_pointing_at_a_trend_moves_nothing(open_page: OpenPage, ordered: str) -> None:
    page = ready(open_page(ordered))
    page.set_viewport_size({"width": 800, "height": 900})
    boxes = "[...document.querySelectorAll('.trend, .trend h2, .panel')]"
    places = f"{boxes}.map((box) => `${{box.offsetTop}} ${{box.offsetHeight}}`)"
    before = page.evaluate(places)
    trend = page.locator(".trend").nth(1)
    trend.scroll_into_view_if_needed()
    trend.locator("> div").last.hover()
    expect(trend.locator("[data-readout]")).to_contain_text("step")
    page.evaluate(
        "document.querySelectorAll('[data-readout]')[1].textContent += ' and much more than there is room for'"
    )
    assert page.evaluate(places) == before


@pytest.mark.nightly
def test_the_thumb_of_the_lanes_is_where_they_are_from_the_beginning(open_page: OpenPage, ordered: str) -> None:
    page = open_page(ordered)
    for width in (1000, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{ordered}order?number=80")
        page.wait_for_function("document.body.dataset.answered > 0")
        middle = page.evaluate(
            "(({start, end}) => (start + end) / 2)(Bokeh.documents[0].get_model_by_name('order').x_range)"
        )
        assert abs(float(page.locator("#place").input_value()) - middle) <= 1


def test_the_slider_of_sizes_shows_every_choice_that_is_a_size(open_page: OpenPage, ordered: str) -> None:
    page = ready(open_page(f"{ordered}buckets?cap_mb=40"))
    page.wait_for_function("document.body.dataset.answered > 0")
    curve = "Bokeh.documents[0].get_model_by_name('curve')"
    marked = f"Array.from({curve}.renderers.at(-1).data_source.data.x)"
    size = "document.getElementById('size')"
    agrees = (
        f"(x => {size}.classList.contains('nowhere') ? !x.length : x.length === 1 && "
        f"Math.abs(x[0] / 10 ** {size}.value - 1) < 1e-3)({marked})"
    )
    for name in ("Current plan", "DDP's default", "Best size"):
        answered = page.evaluate("Number(document.body.dataset.answered)")
        page.get_by_role("button", name=name, exact=True).click()
        page.wait_for_function(f"Number(document.body.dataset.answered) > {answered}")
        page.wait_for_function(agrees)


@pytest.mark.parametrize(
    "path", ["", "order", *(pytest.param(path, marks=pytest.mark.nightly) for path in ("stragglers", "buckets"))]
)
def test_keys_scroll_the_document_below_its_header(open_page: OpenPage, ordered: str, path: str) -> None:
    page = ready(open_page(ordered + path))
    for key, there in (
        ("PageDown", "scrollY > 200"),
        ("End", "scrollY + innerHeight >= document.body.scrollHeight - 2"),
    ):
        page.keyboard.press(key)
        page.wait_for_function(there)
    assert page.evaluate("document.querySelector('header').getBoundingClientRect().top") == 0
