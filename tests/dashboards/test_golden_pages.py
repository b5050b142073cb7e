"""What pages and reports say of recordings that show little, held word for word by golden files."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

import pytest
from bokeh.document import Document

from dashboards.pages import buckets, order, overview, shell, stragglers, timeline
from dashboards.recording import RecordingCache, Snapshot
from dashboards.report.markdown import render_markdown_report
from overlapscope import __version__
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import Trace
from tests.dashboards.report.test_html import NOW, RECORDINGS
from tests.dashboards.test_pages import words

Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "kind",
    [
        "one step",
        "no finished step",
        "ranks without a log",
        "nothing but collectives",
        "a fault, and nothing but collectives",
    ],
)
def test_a_report_reads_as_its_golden_file(kind: str, tmp_path: Path, golden: Golden) -> None:
    text = render_markdown_report(RecordingCache(RECORDINGS[kind](tmp_path / "traces")).latest(), NOW)
    golden(f"report/{re.sub(r'[^a-z]+', '_', kind)}", text.replace(f"OverlapScope {__version__}", "OverlapScope"))


def test_pages_that_have_nothing_to_show_read_as_their_golden_file(
    tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(kind: str) -> Snapshot:
        return RecordingCache(RECORDINGS[kind](tmp_path / kind.replace(" ", "_"))).latest()

    one_rank, one_step, unfinished = read("one rank"), read("one step"), read("no finished step")
    collectives, incomparable = read("nothing but collectives"), Snapshot(read("steps").trace)
    one_step.forecast.exception()  # it is there: the page doesn't say that it is being computed
    one_rank.forecast.exception()
    documents: dict[str, Document] = {}

    def add(name: str, build: Callable[..., None], *arguments: object) -> None:
        documents[name] = Document()
        build(documents[name], *arguments)

    add("an empty folder", shell.build, OverlapScopeError("traces: empty; record a run with 'overlapscope record'"))
    add("steps that were not recorded", shell.build_no_steps, OverlapScopeError("traces: has no step from 500 on"))
    add("a run that does not exist", shell.build_no_run, OverlapScopeError("there is no run of the name 'x' in runs"))
    add("Overview, unfinished", overview.build, unfinished, {})
    add("Overview, collectives", overview.build, collectives, {})
    add("Timeline, collectives", timeline.build, collectives, {})
    add("Stragglers, one rank", stragglers.build, one_rank, {})
    add("Stragglers, one step", stragglers.build, one_step, {})
    add("Stragglers, unfinished", stragglers.build, unfinished, {})
    monkeypatch.setattr(Trace, "aligned_ranks", property(lambda _: [0]))
    add("Stragglers, clocks", stragglers.build, incomparable, {})
    add("Buckets, one rank", buckets.build, one_rank, {})
    add("Buckets, one step", buckets.build, one_step, {})
    add("Buckets, collectives", buckets.build, collectives, {})
    add("Order, steps", order.build, one_step, {})
    golden("pages/nothing_to_show", "\n\n".join(f"{name}\n  {read_main(each)}" for name, each in documents.items()))


def read_main(document: Document) -> str:
    main = words(document).partition("<main")[2].partition(">")[2].partition("</main")[0]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", main)).split())
