"""Every number is said once: what pages show of a recording is what commands say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from overlapscope.breakdown.text import BLOCK_LABELS, REASON_LABELS
from overlapscope.cli.main import main
from overlapscope.interval import Interval
from overlapscope.text import format_interval_ns, format_ns, format_share, format_value
from tests.browser.conftest import OpenPage, served
from tests.synthetic import write_straggling_recording

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RANKS, STEPS = 3, 40
Say = Callable[..., Any]


@dataclass(frozen=True)
class Served:
    folder: Path
    url: str


@pytest.fixture(scope="module")
def straggling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Rank 1 is 3 ms late in every step, and all of them a little now and then."""
    folder = tmp_path_factory.mktemp("breakdown")
    write_straggling_recording(
        folder / "traces",
        late_us=lambda rank, step: 3_000 * (rank == 1) + 70 * ((7 * rank + 3 * step) % 5),
        ranks=RANKS,
        steps=STEPS,
    )
    with served(folder / "traces", folder / "server.log") as url:
        yield Served(folder / "traces", url)


@pytest.fixture
def say(straggling: Served, capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command says as JSON."""

    def said(command: str) -> Any:
        main([command, str(straggling.folder), "--json"])
        return json.loads(capsys.readouterr().out)

    return said


def bars(page: Page) -> dict[str, tuple[str, list[str]]]:
    """By title: how long a step is, and what its blocks say."""
    expect(page.locator(".breakdown-bar")).not_to_have_count(0)
    return {
        bar.locator("b").inner_text(): (
            bar.locator("> span").inner_text(),
            [(piece.get_attribute("title") or "").partition(";")[0] for piece in bar.locator("a").all()],
        )
        for bar in page.locator(".breakdown-bar").all()
    }


def told(blocks_ns: dict[str, float]) -> list[str]:
    return [f"{label}: {format_ns(blocks_ns[name])}" for name, label in BLOCK_LABELS.items() if blocks_ns[name] > 0]


def values(intervals: dict[str, Any]) -> dict[str, float]:
    return {name: each["value"] for name, each in intervals.items()}


@pytest.mark.parametrize("page", ["", "timeline", "buckets", "stragglers"])
def test_the_same_step_heads_every_page(open_page: OpenPage, straggling: Served, say: Say, page: str) -> None:
    breakdown = say("summary")["breakdown"]
    step, blocks = bars(open_page(straggling.url + page))["Mean of all ranks"]
    assert step == format_ns(breakdown["step_ns"]["value"])
    assert blocks == told(values(breakdown["blocks_ns"]))


def test_overview(open_page: OpenPage, straggling: Served, say: Say) -> None:
    page, summary = open_page(straggling.url), say("summary")
    breakdown = summary["breakdown"]
    expect(page.locator(".verdict")).to_contain_text(spaced(summary["sentence"]))
    shown = {
        row.locator("td").first.inner_text(): [cell.inner_text() for cell in row.locator("td").all()[1:4]]
        for row in page.locator(".breakdown tbody tr").all()
    }
    rows = {BLOCK_LABELS[name]: mean for name, mean in breakdown["blocks_ns"].items() if mean["value"]}
    rows |= {REASON_LABELS[name]: mean for name, mean in breakdown["exposed_for_ns"].items() if mean["value"]}
    rows["step"] = breakdown["step_ns"]
    step_ns = breakdown["step_ns"]["value"]
    assert shown == {label: cells_of(mean, step_ns) for label, mean in rows.items()}
    step, blocks = bars(page)["Critical path"]
    assert (step, blocks) == (format_ns(step_ns), told(values(breakdown["critical_path_ns"])))
    headlines = page.locator(".headlines .value").all_inner_texts()
    compute_ns = sum(
        breakdown["blocks_ns"][name]["value"] for name in ("forward", "backward", "optimizer", "evaluation")
    )
    exposed_ns = breakdown["blocks_ns"]["exposed"]["value"]
    assert headlines[:3] == [format_ns(each) for each in (step_ns, compute_ns, exposed_ns)]
    assert headlines[3] == format_share(breakdown["overlap_ratio"])


def test_what_is_worth_doing_is_what_stragglers_and_recommend_say(
    open_page: OpenPage, straggling: Served, say: Say
) -> None:
    page, (finding,) = open_page(straggling.url), say("stragglers")["findings"]
    expect(page.locator("#worth [aria-busy]")).to_have_count(0)
    first = page.locator("#worth li").first
    expect(first).to_contain_text(spaced(finding["sentence"].partition(". Fixing this would save")[0]))
    saving = finding["saving"]["step_ns"]
    expect(first.locator("b")).to_have_text(spaced(format_ns(saving["value"])))
    expect(first.locator(".note")).to_contain_text(spaced(format_interval_ns(Interval(**saving))))
    first.locator("a").click()
    page.wait_for_url(f"**/timeline?step={finding['worst_step']}&rank=1*")


def test_stragglers(open_page: OpenPage, straggling: Served, say: Say) -> None:
    page, breakdown, said = open_page(f"{straggling.url}stragglers"), say("summary")["breakdown"], say("stragglers")
    expect(page.locator(".verdict")).to_have_text(spaced(said["sentence"]))
    assert said["step_ns"] == breakdown["step_ns"]
    assert said["waiting_ns"] == breakdown["exposed_for_ns"]["straggler"]
    shown = bars(page)
    for title, name in (
        ("All ranks at the median", "all_ranks_like_the_median"),
        ("All-reduces at their best", "all_reduces_at_their_best"),
    ):
        saving = said["what_if"][name]
        left = {
            block: mean["value"] - saving["blocks_ns"].get(block, {"value": 0.0})["value"]
            for block, mean in breakdown["blocks_ns"].items()
        }
        assert shown[title] == (format_ns(breakdown["step_ns"]["value"] - saving["step_ns"]["value"]), told(left))
    (finding,) = said["findings"]
    row = page.locator(".blame tbody tr").first
    expect(row).to_contain_text(format_ns(finding["lateness_ns"]))
    expect(row).to_contain_text(format_ns(finding["saving"]["step_ns"]["value"]))


def test_buckets(open_page: OpenPage, straggling: Served, say: Say) -> None:
    page, breakdown, said = open_page(f"{straggling.url}buckets"), say("summary")["breakdown"], say("recommend")
    page.wait_for_function("document.body.dataset.answered > 0", timeout=30_000)
    expect(page.locator(".verdict")).to_have_text(spaced(said["sentences"][0]))
    assert said["now"]["step_ns"] == said["now"]["recorded_ns"] == breakdown["step_ns"]
    assert said["now"]["exposed_ns"] == pytest.approx(breakdown["blocks_ns"]["exposed"]["value"])
    for button, name in (("Best size", "best"), ("Current plan", "now"), ("DDP's default", "default")):
        page.get_by_role("button", name=button, exact=True).click()
        step_ns = said[name]["step_ns"]
        predicted = page.locator("#chosen .headlines div").first
        expect(predicted.locator(".value")).to_have_text(format_ns(step_ns["value"]))
        expect(predicted.locator(".note")).to_have_text(f"{format_ns(step_ns['low'])} to {format_ns(step_ns['high'])}")
        expect(page.locator("#head .breakdown-bar").nth(1).locator("> span")).to_have_text(format_ns(step_ns["value"]))
        expect(page.locator("#chosen .headlines .value").nth(2)).to_have_text(format_ns(said[name]["exposed_ns"]))


def test_this_step_on_the_timeline(open_page: OpenPage, straggling: Served, say: Say) -> None:
    steps = say("summary")["steps"]
    page = open_page(f"{straggling.url}timeline?step=7")
    expect(page.locator("#status")).to_contain_text("in view")
    for number in (7, 8):
        own = [step for step in steps if step["step"] == number]
        mean = {name: sum(step[f"{name}_ns"] for step in own) / RANKS for name in BLOCK_LABELS}
        expect(page.locator(".breakdown-bar b", has_text=re.compile(rf"^Step {number}$"))).to_have_count(1)
        assert bars(page)[f"Step {number}"] == (format_ns(sum(mean.values())), told(mean))
        page.locator("#next").click()


def cells_of(mean: dict[str, float], step_ns: float) -> list[str]:
    interval = Interval(**mean)
    return [format_value(interval, "ms"), format_value(interval, "ms range"), format_share(mean["value"] / step_ns)]


def spaced(text: str) -> re.Pattern[str]:
    """The text, whatever spaces keep its parts together."""
    return re.compile(r"\s".join(map(re.escape, text.split())))
