"""The report as HTML: one file, with what pages say, and nothing that leads out of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from html import unescape
from pathlib import Path

import pytest

from dashboards.pages import overview
from dashboards.plots.step_drawing import draw_step
from dashboards.recording import RecordingCache, Snapshot
from dashboards.report.figures import ReportFigures, load_bokeh_js
from dashboards.report.html import render_html_report
from dashboards.report.sections import list_report_facts
from overlapscope.report.stragglers import build_stragglers_section, tabulate_findings
from overlapscope.text import format_ns
from overlapscope.trace.schema import PLANS_FILE, rank_folder
from tests.dashboards.test_order_page import DUMPS, faulty, healthy
from tests.synthetic import PARAMETERS, make_rank, write_recording, write_straggling_recording

NOW = datetime(2030, 1, 2, 3, 4)


def report(folder: Path) -> str:
    return render_html_report(RecordingCache(folder).latest(), NOW)


def words(page: str) -> str:
    """What is between the tags of a page, without scripts and styles."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", body).replace("\N{NO-BREAK SPACE}", " ").split())


def chapters(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)" class="chapter"', page)


def straggling(folder: Path) -> Path:
    return write_straggling_recording(folder, late_us=lambda rank, _: 3_000 * (rank == 1), ranks=3, steps=40)


def damaged(folder: Path) -> Path:
    log = rank_folder(write_recording(folder, steps=30), 1) / "events.log"
    log.write_bytes(log.read_bytes()[:3000])
    return folder


def unfinished(folder: Path) -> Path:
    make_rank(folder, 0, world_size=1).close()
    return folder


RECORDINGS: dict[str, Callable[[Path], Path]] = {
    "steps": lambda folder: write_recording(folder, steps=30),
    "a straggler": straggling,
    "one rank": lambda folder: write_recording(folder, ranks=1, steps=12),
    "one step": lambda folder: write_recording(folder, steps=1),
    "no finished step": unfinished,
    "more ranks than can be drawn": lambda folder: write_recording(folder, ranks=20, steps=8),
    "a run that goes on": lambda folder: write_recording(folder, steps=12, close=False),
    "ranks without a log": lambda folder: write_recording(folder, world_size=4, steps=12),
    "a damaged log": damaged,
    "a fault, and nothing but collectives": faulty,
    "nothing but collectives": healthy,
    "Flight Recorder dumps": lambda _: DUMPS / "op_mismatch_gloo" / "pickle",
}


Reported = Callable[[str], tuple[Snapshot, str]]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """Gives one of the recordings and its report, the same to all tests."""

    @cache
    def make(kind: str) -> tuple[Snapshot, str]:
        snapshot = RecordingCache(RECORDINGS[kind](tmp_path_factory.mktemp("report") / "traces")).latest()
        return snapshot, render_html_report(snapshot, NOW)

    return make


@pytest.mark.parametrize("kind", RECORDINGS)
def test_it_loads_nothing_and_every_link_leads_to_a_place_in_it(reported: Reported, kind: str) -> None:
    _, page = reported(kind)
    assert len(page) < 3_000_000
    page = page.replace(load_bokeh_js(), "")  # that it loads nothing, tests/browser/test_report.py says
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert " src=" not in page
    assert "static/js" not in page
    links = [link for link in re.findall(r' href="([^"]*)"', page) if not link.startswith("data:image/svg")]
    assert links, "the header has some"
    ids = re.findall(r' id="([^"]*)"', page)
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert len(ids) == len(set(ids))


def test_it_says_nothing_of_the_folder_but_its_name(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "Ada's run & more", world_size=4)
    page = report(folder)
    assert str(tmp_path) not in page
    assert "Ada&#39;s" in page
    assert "Ada's run & more: 2 of 4 ranks" in unescape(page)


def test_it_says_when_and_with_what_it_was_recorded_and_made(reported: Reported) -> None:
    snapshot, made = reported("steps")
    facts, page = dict(list_report_facts(snapshot.trace, NOW)), words(made)
    assert facts["recorded with"] == "overlapscope 0.1.0, python 3.11.7, torch 2.13.0"
    assert facts["DDP arguments of GPT"] == "bucket_cap_mb=None"
    assert "02 Jan 2030, 03:04" in facts["report"]
    for label, value in facts.items():
        assert f"{label} {value}" in page


def test_it_has_the_sentences_and_figures_of_the_pages(reported: Reported) -> None:
    snapshot, made = reported("a straggler")
    page = words(made)
    assert snapshot.stragglers is not None
    for section in (snapshot.breakdown_section, build_stragglers_section(snapshot.stragglers)):
        assert section.headline in page
        for number in section.numbers:
            assert f"{number.label} {number.text} {number.note}".rstrip() in page
    ranks = overview.build_ranks_table(snapshot.trace, snapshot.breakdown_section)
    for row in (*ranks.format_rows(), *tabulate_findings(snapshot.stragglers).format_rows()):
        assert " ".join(row[:2]) in page
    assert chapters(made) == [
        *("overview", "timeline", "stragglers", "buckets", "order"),
        "about",
    ]


def test_the_typical_step_is_drawn_from_its_start_with_what_is_known_of_every_span(tmp_path: Path) -> None:
    snapshot = RecordingCache(write_recording(tmp_path / "traces", steps=12)).latest()
    assert snapshot.summary.typical_step is not None
    step = draw_step(snapshot.trace, snapshot.lanes, snapshot.breakdown, snapshot.summary.typical_step, (0, 1))
    spans = dict(zip(zip(step.spans["text"], step.spans["left"], strict=True), step.spans["right"], strict=True))
    assert spans["backward", 3_000_000] == 7_000_000
    assert spans["bucket 1", 5_000_000] == 6_500_000
    assert spans["bucket 1", 5_050_000] == 6_550_000, "of rank 1, which begins 50 µs later"
    titles = set(step.spans["title"])
    assert sum(text.startswith("exposed ") for text in step.spans["text"]) >= 2, "on both ranks"
    assert {
        "Exposed communication",
        "Backward",
        "All-reduce · bucket 2",
        "Gradient ready · bucket 0",
        "Copy in · bucket 1",
    } <= titles
    assert step.view[0] < 0 < 10_000_000 < step.view[1]
    figures = ReportFigures()
    figures.add_steps([step])
    assert (figures.models["lanes_0"].x_range.start, figures.models["lanes_0"].x_range.end) == step.view


def test_the_typical_step_is_the_one_closest_to_the_mean(tmp_path: Path) -> None:
    folder = write_straggling_recording(
        tmp_path / "traces", late_us=lambda _, step: 100 * step, ranks=2, steps=21, ranks_per_host=2
    )
    summary = RecordingCache(folder).latest().summary
    mean_ns = summary.figures[summary.is_steady].groupby("step")["step_time_ns"].mean()
    away_ns = (mean_ns - summary.mean.step.value).abs()
    assert summary.typical_step is not None
    assert away_ns[summary.typical_step] == away_ns.min()
    assert 8 < summary.typical_step < 16


def test_links_to_steps_that_are_not_in_it_are_text(reported: Reported) -> None:
    snapshot, page = reported("a straggler")
    (step, rank, longest_ns) = snapshot.summary.longest["forward"]
    where = f"{format_ns(longest_ns)} in step {step} of rank {rank}"
    lead = ' href="#timeline"' if step == snapshot.summary.typical_step else ""
    assert f"<a{lead}>{where}</a>" in page
    assert "timeline?" not in page


def test_a_fault_comes_first(reported: Reported, tmp_path: Path) -> None:
    assert chapters(reported("steps")[1])[0] == "overview"
    folder = faulty(write_recording(tmp_path / "traces", ranks=3, steps=12))
    figures, snapshot = ReportFigures(), RecordingCache(folder).latest()
    assert chapters(render_html_report(snapshot, NOW))[0] == "order"
    assert snapshot.diagnosis is not None
    figures.add_order(snapshot, snapshot.diagnosis)
    texts = [each.data_source.data.get("text", ()) for each in figures.models["order"].renderers]
    assert any("extra · 4,096" in text for text in texts), "the collective that no other rank has is drawn"


@pytest.mark.parametrize("kind", ["nothing but collectives", "Flight Recorder dumps"])
def test_without_steps_it_has_the_order_and_nothing_about_steps(reported: Reported, kind: str) -> None:
    assert chapters(reported(kind)[1]) == ["order", "about"]


def test_a_file_may_load_nothing(reported: Reported) -> None:
    _, page = reported("steps")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy is not None
    assert policy.start() < page.index("<script"), "what comes before is not held by it"
    assert "default-src 'none'" in unescape(policy[1])
    assert not re.search(r"https?:|\*|'self'", unescape(policy[1]))


def test_names_in_a_recording_are_text_and_never_markup(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "traces", steps=12)
    evil = "</script><img src=x onerror=alert(1)>"
    for rank in range(2):
        plans = rank_folder(folder, rank) / PLANS_FILE
        plans.write_text(plans.read_text().replace(PARAMETERS[0][0], evil))
    page = report(folder)
    assert evil not in page
    assert "<img" not in page
    snapshot = RecordingCache(folder).latest()
    assert [evil] in [
        values[2:3] for values in draw_step(snapshot.trace, snapshot.lanes, snapshot.breakdown, 2, (0,)).spans["values"]
    ]
