"""The table of runs: what its rows say, and how they follow what happens."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from bokeh.document import Document
from bokeh.events import DocumentReady
from hypothesis import given
from hypothesis import strategies as st

from dashboards.app import open_run_page
from dashboards.pages import overview
from dashboards.pages.runs import _LiveTable, build_row_view, render_row
from dashboards.pages.runs import build as build_table
from dashboards.recording import RecordingCache
from dashboards.runs import RunIndex, RunRow, RunSummary
from dashboards.urls import RunUrl, run_pages_url
from overlapscope.breakdown.text import describe_summary
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.errors import OverlapScopeError
from overlapscope.text import format_ns, format_share
from overlapscope.trace import clocks
from overlapscope.trace.json_files import write_json
from overlapscope.trace.runs import NOTES_FILE, RunNotes, read_notes
from overlapscope.trace.schema import ENDED_FILE, RANK_FILE, rank_folder
from tests.dashboards.test_pages import words
from tests.synthetic import make_rank, write_recording, write_step

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder" / "hang_3"
PATIENCE_S = 60


def rows_when(runs: RunIndex, is_so: Callable[[tuple[RunRow, ...]], bool]) -> tuple[RunRow, ...]:
    """The rows once something is true of them, which is known in the background."""
    until = time.monotonic() + PATIENCE_S
    while not is_so(rows := runs.latest()):
        assert time.monotonic() < until, rows
        time.sleep(0.05)
    return rows


def judged(runs: RunIndex) -> tuple[RunRow, ...]:
    return rows_when(runs, lambda rows: bool(rows) and all(row.judged is not None for row in rows))


def with_live_process(folder: Path, rank: int) -> None:
    """Let this process be the one that records a rank."""
    sample = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
    where = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "device": "cuda:1"}
    content = {**where, "boot_id": clocks.get_boot_id(), "clock_samples": [sample]}
    write_json(rank_folder(folder, rank) / RANK_FILE, content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy run and one that hangs, in folders."""
    write_recording(tmp_path / "traces" / "nightly" / "one", steps=30)
    shutil.copytree(DUMPS, tmp_path / "traces" / "dumps")
    return tmp_path / "traces"


def test_figures_and_verdicts_are_those_of_the_pages(folder):
    incident, healthy = judged(RunIndex([folder]))
    summary = RecordingCache(folder / "nightly" / "one").latest().summary
    view = build_row_view(healthy)
    assert view.cells["step"][:2] == (format_ns(summary.mean.step.value), summary.mean.step.value)
    assert view.cells["exposed"][1] == summary.mean.blocks["exposed"].value
    assert view.cells["hidden"][:2] == (format_share(summary.overlap_ratio), summary.overlap_ratio)
    assert view.kind == "No verdict"
    assert view.line.startswith("No collective logs")  # the reason comes first
    assert view.line.endswith(describe_summary(summary))
    assert [view.cells[name][0] for name in ("model", "ranks", "device", "steps")] == ["GPT", "2", "cpu", "30"]
    verdict = Diagnosis.of_dumps(folder / "dumps").verdict
    assert build_row_view(incident).line == " ".join(verdict.sentence.split())
    assert build_row_view(incident).badges == ("incident",)
    assert build_row_view(incident).address == "runs/dumps/-/order"


def test_what_takes_long_is_said_to_be_read_until_it_is_known(folder):
    row = judged(RunIndex([folder]))[1]
    assert build_row_view(replace(row, is_live=True)).cells["step"] == build_row_view(row).cells["step"]
    unread = RunRow(run=row.run, facts=row.facts, is_live=False)
    assert render_row(unread).count("reading …") == 3
    assert "≈ 10.0" in render_row(unread).replace("\N{NO-BREAK SPACE}", " ")
    assert "reading" not in render_row(row)


def test_incidents_come_first_then_live_runs_then_the_newest(folder):
    log = make_rank(folder / "live", 0, world_size=1)
    write_step(log, 0, begin_ns=1_000_000_000)
    with_live_process(folder / "live", 0)
    rows = judged(RunIndex([folder]))
    assert [row.run.name for row in rows][1:] == ["live", "nightly/one"]
    assert [row.is_live for row in rows] == [False, True, False]
    assert "live" in build_row_view(rows[1]).badges


def test_rows_follow_a_run_that_is_being_recorded_and_new_ones_appear(folder):
    log = make_rank(folder / "live", 0, world_size=1)
    write_step(log, 0, begin_ns=1_000_000_000)
    with_live_process(folder / "live", 0)
    runs = RunIndex([folder])
    live = next(row for row in rows_when(runs, lambda rows: len(rows) == 3) if row.is_live)
    assert (live.facts.steps, live.facts.device) == (1, "cuda")
    for step in (1, 2):
        write_step(log, step, begin_ns=1_000_000_000 + step * 10_000_000)
    rows_when(runs, lambda rows: any(row.is_live and row.facts.steps == 3 for row in rows))
    write_recording(folder / "new", ranks=1, steps=1)
    rows_when(runs, lambda rows: any(row.run.name == "new" for row in rows))
    (folder / "new").rename(folder.parent / "gone")
    rows_when(runs, lambda rows: all(row.run.name != "new" for row in rows))


def test_a_run_on_another_host_is_live_while_its_log_grows_and_then_no_incident(tmp_path):
    log = make_rank(tmp_path / "elsewhere", 0, world_size=1, host="another")
    write_step(log, 0, begin_ns=1_000_000_000)
    runs = RunIndex([tmp_path])
    (before,) = judged(runs)
    assert not before.is_live
    write_step(log, 1, begin_ns=1_010_000_000)
    (row,) = rows_when(runs, lambda rows: rows[0].is_live)
    assert row.facts.steps == 2
    cannot_tell = RunSummary(line="", has_enough_evidence=False, is_fault=True, is_incident=True)
    assert not replace(row, judged=cannot_tell).is_incident
    assert replace(row, judged=cannot_tell, is_live=False).is_incident
    log.close()
    write_json(rank_folder(tmp_path / "elsewhere", 0) / ENDED_FILE, {"how": "ended"})
    rows_when(runs, lambda rows: not rows[0].is_live)


def test_attempts_are_one_row_that_shows_the_newest(tmp_path):
    job = write_recording(tmp_path / "traces" / "job", ranks=1, steps=3)
    write_recording(job / "restart_1", ranks=1, steps=7)
    (row,) = judged(RunIndex([tmp_path / "traces"]))
    view = build_row_view(row)
    assert (view.attempts, view.address) == ("2 attempts", "runs/job/restart_1/-/")
    assert view.cells["steps"][0] == "7"


def test_a_recording_that_can_not_be_read_says_why_and_hides_no_other(folder):
    (folder / "broken" / "rank_0").mkdir(parents=True)
    (folder / "broken" / "rank_0" / "events.log").write_bytes(b"no log")
    rows = {row.run.name: row for row in judged(RunIndex([folder]))}
    assert len(rows) == 3
    assert build_row_view(rows["broken"]).kind_class == "fault"
    assert "events.log" in build_row_view(rows["broken"]).line


def test_a_folder_without_runs_says_how_to_make_one(tmp_path):
    document = Document()
    build_table(document, RunIndex([tmp_path, tmp_path / "later"]))
    page = words(document)
    assert f"{tmp_path}: empty" in page
    assert f"{tmp_path}/later: no such folder" in page
    assert "overlapscope record -o" in page


def test_names_tags_and_notes_are_shown_as_they_are_and_never_as_markup(tmp_path):
    evil = '<img src=x onerror="alert(1)">'
    write_recording(tmp_path / "traces" / "<b>bold<", ranks=1, steps=1)
    runs = RunIndex([tmp_path / "traces"])
    (row,) = judged(runs)
    runs.annotate(row.run.name, RunNotes(tags=(evil,), note=evil), RunNotes())
    html = render_row(runs.latest()[0])
    assert "<img" not in html
    assert "<b>bold" not in html
    assert "&lt;img" in html


def test_tags_and_notes_are_kept_beside_the_run_of_all_attempts(tmp_path):
    job = write_recording(tmp_path / "traces" / "job", ranks=1, steps=1)
    write_recording(job / "restart_1", ranks=1, steps=1)
    runs = RunIndex([tmp_path / "traces"])
    rows_when(runs, bool)
    notes = RunNotes(tags=("baseline",), note="as it was")
    runs.annotate("job", notes, RunNotes())
    assert read_notes(job) == notes
    assert runs.latest()[0].notes == notes


def test_notes_that_somebody_else_has_changed_are_not_written_over(folder):
    runs = RunIndex([folder])
    rows_when(runs, bool)
    runs.annotate("dumps", RunNotes(note="theirs"), RunNotes())
    with pytest.raises(OverlapScopeError, match="changed them meanwhile"):
        runs.annotate("dumps", RunNotes(note="mine"), RunNotes())
    assert read_notes(folder / "dumps").note == "theirs"


def test_notes_that_can_not_be_read_are_said_in_the_row(folder):
    (folder / "dumps" / NOTES_FILE).write_text("{")
    row = next(row for row in rows_when(RunIndex([folder]), bool) if row.run.name == "dumps")
    assert "repair it, or remove it" in render_row(row)


def test_an_open_page_is_told_of_rows_that_changed_and_of_no_others(folder):
    runs = RunIndex([folder])
    rows = judged(runs)
    table = _LiveTable(runs, rows)
    table.update()
    assert table.changed.data["name"] == []
    runs.annotate("dumps", RunNotes(note="new"), RunNotes())
    table.update()
    assert table.changed.data["name"] == ["dumps"]
    assert table.order.data["name"] == ["dumps", "nightly/one"]


def test_a_page_is_told_of_nothing_before_it_is_ready_and_then_of_all_that_changed_since_it_was_made(folder):
    runs = RunIndex([folder])
    judged(runs)
    document = Document()
    build_table(document, runs)
    assert document.session_callbacks == []
    runs.annotate("dumps", RunNotes(note="new"), RunNotes())
    document.callbacks.trigger_event(DocumentReady())
    (callback,) = document.session_callbacks
    callback.callback()
    changed = document.roots[0].tags[0]["rpc"][1]
    assert changed.data["name"] == ["dumps"]


def test_a_page_that_asks_for_what_can_not_be_kept_is_told_why(folder):
    runs = RunIndex([folder])
    rows = rows_when(runs, bool)
    table = _LiveTable(runs, rows)
    wanted = {"id": 1, "name": "../dumps", "tags": "a", "note": "", "seen_tags": "", "seen_note": ""}
    table.wanted.data = {name: [value] for name, value in wanted.items()}
    assert "'../dumps'" in table.response.data["error"][0]
    table.wanted.data = {name: [value] for name, value in {**wanted, "id": 2, "name": "dumps"}.items()}
    assert table.response.data == {"id": [2], "error": [""]}
    assert read_notes(folder / "dumps").tags == ("a",)


@given(
    name=st.lists(st.text(st.characters(exclude_characters="/\0"), min_size=1), min_size=1, max_size=4).map("/".join)
)
def test_an_address_leads_back_to_the_name_of_its_run_and_from_its_pages_to_the_top(name):
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return
    address = run_pages_url(name)
    place = RunUrl.from_route(address.removeprefix("runs/").removesuffix("/-/"))
    assert place.run == name
    assert place.top_url.count("../") == address.count("/")
    assert unquote(address).isascii() == name.isascii()


def page_of(runs: RunIndex, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    document = Document()
    monkeypatch.setattr("dashboards.app.curdoc", lambda: document)
    open_run_page(overview.build, runs, name)
    return words(document)


def test_pages_of_a_run_lead_back_to_the_table(folder, monkeypatch):
    page = page_of(RunIndex([folder]), "nightly/one", monkeypatch)
    assert 'href="../../../../"' in page
    assert "is hidden" in page
    assert "nightly/one" in page


@pytest.mark.parametrize(
    "name", ["..", "../traces/dumps", "nightly", "nightly/..%2fdumps", "%2e%2e/secret", "/", "%00"]
)
def test_an_address_of_no_run_is_a_page_that_says_so(folder, name, monkeypatch):
    write_recording(folder.parent / "secret", ranks=1, steps=1)
    page = page_of(RunIndex([folder]), name, monkeypatch)
    assert "<h1>" in page
    assert "is hidden" not in page


def test_with_several_runs_an_address_without_one_says_so(folder, monkeypatch):
    assert "names no run" in page_of(RunIndex([folder]), "", monkeypatch)


def test_a_recording_alone_is_served_as_before(folder, monkeypatch):
    page = page_of(RunIndex([folder / "nightly" / "one"]), "", monkeypatch)
    assert "is hidden" in page
    assert ">Runs</a>" not in page
