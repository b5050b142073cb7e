"""Comparisons on the server: what an address asks for, and that it is what the command says."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from dashboards import comparisons
from dashboards import recording as recording_module
from dashboards.comparisons import ComparisonCache, ComparisonResult, SideRequest
from dashboards.pages.compare import format_compare_url, parse_sides
from dashboards.recording import RecordingCache
from dashboards.runs import RunIndex
from overlapscope.compare.side import StepChoice
from overlapscope.trace.schema import PLANS_FILE, rank_folder
from tests.cli.command_line import overlapscope
from tests.cli.test_compare import recorded
from tests.dashboards.running import Running, running
from tests.synthetic import make_rank, write_recording, write_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparisons") / "runs"
    recorded(folder / "base", 0, 0)
    recorded(folder / "nightly" / "slower", 2, 500)
    write_recording(folder / "short", steps=5)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    runs = RunIndex([folder])
    with running(runs) as server:
        yield server
    runs.close()


def page_of(server: Running, query: str, prefix: str = "") -> str:
    """The page when it is there."""
    until = time.monotonic() + 60
    while 'aria-busy="true"' in (page := server.get(f"{prefix}/compare{query}").text):
        assert time.monotonic() < until, "it is never ready"
        time.sleep(0.1)
    return page


def words_of(server: Running, query: str, prefix: str = "") -> str:
    """The text of the page when it is there, without markup."""
    page = page_of(server, query, prefix)
    text = re.sub(
        r"<(script|style).*?</\1>|<[^>]+>", " ", page.partition("<main")[2].partition(">")[2], flags=re.DOTALL
    )
    return " ".join(unescape(text).split())


def made(comparisons: ComparisonCache, base: SideRequest, new: SideRequest) -> ComparisonResult:
    until = time.monotonic() + 60
    while (found := comparisons.soon(base, new)) is None:
        assert time.monotonic() < until, "it is never ready"
        time.sleep(0.05)
    return found


def wanted(path: Path, **choice: int) -> SideRequest:
    return SideRequest(recording=path.name, path=path, choice=StepChoice(**choice))


def test_the_page_says_what_the_command_says(server: Running, folder: Path) -> None:
    page = words_of(server, "?base=base&new=nightly%2Fslower")
    said = overlapscope("compare", folder / "base", folder / "nightly" / "slower", "--format", "md").stdout
    for line in said.splitlines():
        if line.startswith("**"):
            assert line.strip("*") in page
        elif line.startswith("| ") and " :-- " not in line:
            assert " ".join(re.sub(r"[|↳]", " ", line).split()) in page
    assert str(folder) not in page, "runs are called by their names"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "Two runs, or one run and two ranges of its steps."),
        ("?base=base", "Two runs, or one run and two ranges of its steps."),
        ("?base=base&new=base", "Both sides are the same steps of base. Choose another run, or two ranges"),
        ("?base=base&new=base&base_steps=:40", "No significant difference"),
        ("?base=base&new=nobody", "There is no run of the name 'nobody'"),
        ("?base=base&new=../base", "There is no run of the name '../base'"),
        ("?base=base&new=short", "excluded); a comparison takes 8 or more on each side."),
        ("?base=base&new=nightly/slower&new_steps=3-9", "'3-9' is no range of steps: give one like 10:50"),
        ("?base=base&new=nightly/slower&base_plan=1", "its bucket plans are 0"),
        ("?base=base&new=nightly/slower&base_plan=-1", "'-1' is no bucket plan"),
        ("?base=%ff&new=<b>", "There is no run of the name"),
    ],
)
def test_what_is_missing_or_can_not_be_compared_is_said_in_a_sentence(server: Running, query: str, said: str) -> None:
    assert said in words_of(server, query)


def test_a_run_that_is_served_alone_has_ranges_and_no_choice_of_runs(folder: Path) -> None:
    runs = RunIndex([folder / "base"])
    with running(runs, prefix="/scope") as server:
        assert ">Order</a>" in server.get("/scope/compare").text
        page = words_of(server, "?base=x&base_steps=:20&new_steps=20:", "/scope")
        assert "Base: base steps 0 to 19: GPT" in page
        assert "choose a run" not in page
    runs.close()


def test_plans_of_one_run_can_be_chosen_if_there_are_several(tmp_path: Path) -> None:
    log = make_rank(tmp_path / "run", 0, world_size=1)
    plans = rank_folder(tmp_path / "run", 0) / PLANS_FILE
    plans.write_text(plans.read_text() + plans.read_text().replace('"epoch": 0', '"epoch": 1'))
    for step in range(40):
        write_step(log, step, begin_ns=1_000_000_000 + step * 10_000_000, plan_epoch=step // 20)
    log.close()
    runs = RunIndex([tmp_path])
    with running(runs) as server:
        page = words_of(server, "?base=run&new=run&base_plan=0&new_plan=1")
    runs.close()
    assert page.count("Bucket plan all 0 1") == 2
    assert "New: run with bucket plan 1: GPT, means of 20 steps of 1 rank" in page


def test_an_address_keeps_what_was_asked_for() -> None:
    query = {"base": "a b/ü&", "new": "b", "base_steps": ":50", "new_plan": "3"}
    chosen = parse_sides({name: [value.encode()] for name, value in query.items()}, has_table=True)
    assert format_compare_url(*chosen) == "compare?base=a+b%2F%C3%BC%26&base_steps=%3A50&new=b&new_plan=3"
    assert format_compare_url(*reversed(chosen)) == "compare?base=b&base_plan=3&new=a+b%2F%C3%BC%26&new_steps=%3A50"


def test_the_server_waits_for_no_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    compare = comparisons.compare
    monkeypatch.setattr(comparisons, "compare", lambda *sides: may_go_on.wait(60) and compare(*sides))
    made_here = ComparisonCache(RecordingCache)
    sides = wanted(folder / "base"), wanted(folder / "nightly" / "slower")
    assert made_here.soon(*sides) is None
    assert made_here.soon(*sides) is None
    may_go_on.set()
    assert made(made_here, *sides).found is not None
    made_here.close()


def test_a_comparison_is_made_again_once_a_recording_has_grown(tmp_path: Path) -> None:
    log = make_rank(tmp_path / "run", 0, world_size=1)
    for step in range(30):
        write_step(log, step, begin_ns=1_000_000_000 + step * 10_000_000)
    made_here = ComparisonCache(RecordingCache)
    sides = wanted(tmp_path / "run", end=15), wanted(tmp_path / "run", first=15)
    before = made(made_here, *sides)
    assert made(made_here, *sides) is before
    write_step(log, 30, begin_ns=1_300_000_000)
    after = made(made_here, *sides)
    log.close()
    made_here.close()
    assert before.found is not None
    assert after.found is not None
    assert (len(before.found.new.steps), len(after.found.new.steps)) == (15, 16)


def test_of_a_recording_that_does_not_fit_the_steps_that_are_compared_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path / "run", 0, 500, steps=90)
    sides = wanted(run, first=20, end=35), wanted(run, first=60, end=75)
    found: list[ComparisonResult] = []
    for free_bytes in (None, 1000):
        monkeypatch.setattr(recording_module, "free_bytes", lambda free_bytes=free_bytes: free_bytes)
        recording = RecordingCache(run)
        made_here = ComparisonCache(lambda _, recording=recording: recording)
        found.append(made(made_here, *sides))
        made_here.close()
    of_all, of_some = (each.found for each in found)
    assert of_all is not None
    assert of_some is not None
    assert (of_all.base.trace.extent, of_some.base.trace.extent) == ("all", "chosen")
    assert of_some.changes["forward"] == of_all.changes["forward"]
    assert of_some.step == of_all.step


def test_each_of_the_steps_that_differ_most_is_drawn_of_both_sides(folder: Path) -> None:
    made_here = ComparisonCache(RecordingCache)
    found = made(made_here, wanted(folder / "base"), wanted(folder / "nightly" / "slower"))
    made_here.close()
    assert found.found is not None
    assert len(found.found.steps) > 1
    for pair, drawings in zip(found.found.steps, found.drawings, strict=True):
        assert [drawing.number for drawing in drawings] == [pair.base_step, pair.new_step]
        assert all(sorted(pair.ranks) == list(drawing.ranks) for drawing in drawings)
        ends_ns = [drawing.spans["right"][drawing.spans["text"].index("forward")] for drawing in drawings]
        assert ends_ns[1] - ends_ns[0] == pytest.approx(pair.new_block_ns - pair.base_block_ns, abs=1)


def test_the_address_says_which_of_the_steps_is_drawn(server: Running) -> None:
    sides = "?base=base&new=nightly%2Fslower"
    first, second = re.findall(r"Draw step (\d+)", page_of(server, sides))[:2]
    for query, step in (("", first), ("&step=nonsense", first), ("&step=9999", first), (f"&step={second}", second)):
        text = words_of(server, sides + query)
        assert f"Base step {step} of base" in text
        assert ("The step that differs most, on one axis" in text) == (step == first)


def test_several_runs_are_compared_with_the_base_in_one_table(server: Running) -> None:
    query = "?base=base&new=nightly%2Fslower&new=short&new=gone"
    page = page_of(server, query)
    rows = [" ".join(re.sub(r"<[^>]+>", " ", row).split()) for row in page.partition("<tbody>")[2].split("<tr>")[1:]]
    assert [row.split()[0] for row in rows] == ["base", "nightly/", "short", "gone"]
    assert "Slower" in rows[1]
    assert "%" in rows[1]
    assert "no run of the name" in unescape(rows[3])
    assert 'href="compare?base=nightly%2Fslower&amp;new=base&amp;new=short&amp;new=gone"' in page  # make it the base
    assert 'href="compare?base=base&amp;new=short&amp;new=gone"' in page  # without it
    in_detail = words_of(server, "?base=base&new=nightly%2Fslower")
    sentence = rows[1].partition("Slower")[2].removesuffix(" in detail")
    assert sentence.replace("\N{NO-BREAK SPACE}", " ").strip() in in_detail.replace("\N{NO-BREAK SPACE}", " ")


def test_a_table_of_comparisons_keeps_what_it_shows_while_a_run_grows(tmp_path: Path) -> None:
    base, new = (recorded(tmp_path / name, 0, 0) for name in ("base", "new"))
    cache = ComparisonCache(RecordingCache)
    sides = wanted(base), wanted(new)
    until = time.monotonic() + 60
    while (known := cache.outline(*sides)) is None:
        assert time.monotonic() < until, "it is never ready"
        time.sleep(0.05)
    (rank_folder(new, 0) / "more.json").write_text("{}")
    assert cache.outline(*sides) == known
    cache.close()
