"""The page of the order of collectives, read from the documents and sources that the server would send."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from bokeh.document import Document

from dashboards.app import ROUTES
from dashboards.pages import order, overview
from dashboards.pages.order import list_code_lines, list_rank_positions, render_number_details
from dashboards.pages.shell import format_code
from dashboards.plots.browser_rpc import BrowserRpc
from dashboards.plots.order import OrderPlot
from dashboards.plots.order_columns import OrderLayout, build_step_columns, build_text_columns
from dashboards.recording import RecordingCache, Snapshot
from overlapscope.cli.main import main
from overlapscope.diagnosis.evidence import CallSite, RankEvidence, RankPosition
from overlapscope.diagnosis.order_view import Window
from overlapscope.diagnosis.report_text import describe_lasting_damage
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import JOINING_FILE, REPORTS_FILE, rank_folder
from tests.dashboards.test_pages import words
from tests.ordered import BEGIN_NS, Collective, all_reduce, bucket, end, steps, write_order
from tests.synthetic import write_recording

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"
EXTRA = Collective(signature=all_reduce("extra", 4096), step=2, batch=2, line=120)


def faulty(folder: Path, ranks: int = 3, culprit: int = 1) -> Path:
    """A recording in which one rank has launched a collective that no other has, as its seventh."""
    with_extra = [*steps(2), EXTRA, *steps(2, first=2)]
    write_order(folder, {rank: with_extra if rank == culprit else steps(4) for rank in range(ranks)})
    end(folder, range(ranks))
    return folder


def healthy(folder: Path, ranks: int = 3) -> Path:
    write_order(folder, dict.fromkeys(range(ranks), steps(4)))
    end(folder, range(ranks))
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    return RecordingCache(faulty(tmp_path / "traces")).latest()


def build(snapshot: Snapshot, **arguments: str) -> tuple[Document, str]:
    document = Document()
    order.build(document, snapshot, {name: [value.encode()] for name, value in arguments.items()})
    return document, words(document)


def plot_of(snapshot: Snapshot, shown: Sequence[int] = (0, 1, 2), number: int = 7) -> OrderPlot:
    diagnosis = snapshot.diagnosis
    assert diagnosis is not None
    (group,) = diagnosis.groups
    lanes = diagnosis.lanes(group)
    return OrderPlot(
        lanes,
        lanes.lanes_of(shown),
        highlight=diagnosis.highlight(group),
        selected=(0, number),
    )


def test_the_page_begins_with_the_verdict_and_both_call_sites(snapshot):
    _, page = build(snapshot)
    assert "Missing collective" in page
    assert snapshot.diagnosis.verdict.sentence in page
    assert "train.py:42 (main)" in page
    assert "train.py:120 (main)" in page
    assert "ranks 0, 2" in page


def test_of_a_job_that_was_started_again_it_says_why_the_other_attempts_ended(snapshot):
    assert "Attempt" not in build(snapshot)[1]
    first = snapshot.trace.path
    recording = RecordingCache(healthy(first / "restart_1"))
    assert f"Attempt 0 ({first})" in build(recording.latest())[1]
    snapshot.drop_outdated()
    said = f"Attempt 1 ({first / 'restart_1'})"
    assert said in build(snapshot)[1]
    document = Document()
    overview.build(document, snapshot, {})
    assert said in words(document)


def test_what_else_a_verdict_could_be_is_said(snapshot):
    found = snapshot.diagnosis
    found.verdict = replace(found.verdict, alternative="the job may only be slow")
    assert "the job may only be slow" in build(snapshot)[1]


def test_a_healthy_recording_says_so_and_shows_its_lanes(tmp_path):
    snapshot = RecordingCache(healthy(tmp_path / "traces")).latest()
    document, page = build(snapshot)
    assert 'class="kind healthy"' in page
    assert document.get_model_by_name("order") is not None
    assert not snapshot.diagnosis.is_incident


@pytest.mark.parametrize("gone", ["rank_1", "rank_1/group_0.log"])
def test_of_an_incomplete_recording_it_says_what_the_command_says(tmp_path, gone, capsys):
    traces = healthy(tmp_path / "traces")
    path = traces / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["diagnose", str(traces)]) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    snapshot = RecordingCache(traces).latest()
    _, page = build(snapshot)
    assert sentence in unescape(page)
    assert "Cannot tell" in page
    assert 'class="kind healthy"' not in page
    assert snapshot.diagnosis.is_incident


def test_of_a_job_that_failed_before_its_first_collective_it_has_the_verdict(tmp_path):
    for rank in range(2):
        rank_folder(tmp_path, rank).mkdir()
        began = {"rank": rank, "world_size": 2, "host": "a", "pid": 7 + rank, "boot_id": "b", "time_ns": 1}
        write_json(rank_folder(tmp_path, rank) / JOINING_FILE, began)
    failure = {"type": "ModuleNotFoundError", "message": "No module named 'x'", "traceback": "", "frames": []}
    exit_ = {"exit_status": None, "exit_text": "", "exit_frames": []}
    write_json(tmp_path / "early_end_a_8.json", began | failure | exit_ | {"time_ns": 2})
    snapshot = RecordingCache(tmp_path).latest()
    _, page = build(snapshot)
    assert 'class="kind fault">Failed' in page
    assert "Rank 1 failed in init_process_group" in page.partition("<h1")[2].partition("</h1>")[0]
    assert "No order of collectives" in page
    document = Document()
    overview.build(document, snapshot, {})
    assert "No collective was recorded" in words(document)


def test_if_all_collective_logs_are_damaged_it_says_so(tmp_path):
    traces = healthy(tmp_path / "traces", ranks=2)
    for rank in range(2):
        path = rank_folder(traces, rank) / "group_0.log"
        path.write_bytes(b"x" + path.read_bytes()[1:])
    _, page = build(RecordingCache(traces).latest())
    assert "rank_0/group_0.log: not a collective log" in page


def test_damaged_logs_are_named_and_the_others_shown(tmp_path):
    folder = faulty(tmp_path / "traces")
    (rank_folder(folder, 2) / "group_0.log").write_bytes(b"something else")
    _, page = build(RecordingCache(folder).latest())
    assert 'class="banner error"' in page
    assert "rank_2/group_0.log" in page
    assert "left no log" in page


def test_names_in_a_recording_are_text_and_never_markup(tmp_path):
    evil = Collective(signature=all_reduce("<script>alert(1)</script>"))
    write_order(tmp_path / "traces", {0: [evil], 1: [evil]})
    _, page = build(RecordingCache(tmp_path / "traces").latest())
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_parameters_of_a_bucket_come_from_its_plan(tmp_path):
    folder = write_recording(tmp_path / "traces")
    one = Collective(signature=replace(bucket(1, plan_hash="0" * 16), names=()))
    write_order(folder, {0: [one], 1: [one]})
    _, page = build(RecordingCache(folder).latest(), number="1")
    assert "body.1.weight" in page
    assert "16 MB" in page


def test_the_overview_says_what_is_wrong_and_leads_there(snapshot, tmp_path):
    document = Document()
    overview.build(document, snapshot, {})
    assert snapshot.diagnosis.verdict.sentence in words(document)
    assert 'href="order"' in words(document)
    document = Document()
    overview.build(document, RecordingCache(write_recording(tmp_path / "other")).latest(), {})
    assert "→ Order" not in words(document)


def test_in_trouble_the_step_heads_the_page_unless_it_had_to_be_waited_for(tmp_path, monkeypatch):
    traces = faulty(write_recording(tmp_path / "traces", ranks=3))
    _, page = build(RecordingCache(traces).latest())
    assert page.index("launched all_reduce") < page.index("Mean of all ranks")
    monkeypatch.setattr(order, "_MAX_INCIDENT_STEPS", 5)
    assert "Mean of all ranks" not in build(RecordingCache(traces).latest())[1]


@pytest.mark.parametrize("route", sorted(ROUTES))
def test_dumps_of_the_flight_recorder_have_an_order_and_nothing_else(route):
    snapshot = RecordingCache(DUMPS / "op_mismatch_gloo" / "pickle").latest()
    document = Document()
    ROUTES[route](document, snapshot, {})
    page = words(document)
    if route.endswith("order"):
        assert "broadcast" in page
        assert "step -1" not in page
        assert "your code" not in page
    assert snapshot.diagnosis.is_incident


def test_what_the_watchdog_said_is_listed_once_with_the_stacks_of_those_blamed_first(tmp_path):
    folder = healthy(tmp_path / "traces")
    for rank in range(3):
        stuck = {"report": 1, "time_ns": BEGIN_NS + 10**9, "step": 3, "message": "Stuck!", "retracted_ns": None}
        slow = {**stuck, "report": 2, "message": "Slow.", "retracted_ns": BEGIN_NS + 2 * 10**9}
        lines = [json.dumps(stuck), json.dumps(slow), "{damaged"]
        (rank_folder(folder, rank) / REPORTS_FILE).write_text("\n".join(lines))
        (rank_folder(folder, rank) / "stacks_1.txt").write_text(f"stack of {rank}")
    snapshot = RecordingCache(folder).latest()
    _, page = build(snapshot)
    assert page.count("Stuck!") == 1
    assert "Ranks 0-2 · step 3" in page
    assert "Withdrawn 1.00 s later" in page
    assert page.index("stack of 0") < page.index("stack of 1") < page.index("stack of 2")
    assert snapshot.diagnosis.is_incident


def test_many_ranks_that_did_the_same_share_a_lane_unless_the_address_asks_for_them(tmp_path):
    snapshot = RecordingCache(faulty(tmp_path / "traces", ranks=20, culprit=7)).latest()
    lanes = snapshot.diagnosis.lanes(snapshot.diagnosis.groups[0])
    shown, note = order.choose_lanes(lanes, {})
    assert [len(lane.ranks) for lane in shown] == [19, 1]
    assert "share a lane" in note
    shown, note = order.choose_lanes(lanes, {"ranks": [b"0-2,99"]})
    assert [lane.ranks for lane in shown] == [(0,), (1,), (2,), (7,)]
    assert "there is no rank 99" in note


def test_the_address_chooses_the_cell_and_nonsense_is_ignored(snapshot):
    (group,) = snapshot.diagnosis.groups
    lanes = snapshot.diagnosis.lanes(group)
    shown = lanes.lanes_of((0, 1, 2))

    def selected(**arguments: bytes) -> tuple[int, int]:
        return order.parse_selected_cell(
            snapshot.diagnosis, lanes, shown, {name: [value] for name, value in arguments.items()}
        )

    assert selected() == (1, 7)
    assert selected(number=b"3", rank=b"2") == (2, 3)
    assert selected(number=b"99999", rank=b"-1") == (1, 13)
    assert selected(number=b"\xff", rank=b"x") == (1, 7)


def test_cells_say_how_far_a_collective_has_come(tmp_path):
    states = ("completed", "launched", "failed", "announced")
    latest = [replace(one, state=state) for one, state in zip([*steps(1), steps(1)[0]], states, strict=True)]
    write_order(tmp_path / "traces", {0: latest, 1: steps(1)[:1]})
    plot = plot_of(RecordingCache(tmp_path / "traces").latest(), shown=(0, 1), number=1)
    cells = plot.cells.data
    assert cells["lane"] == [0, 0, 0, 0, 1]
    assert cells["alpha"][0] == 1 > cells["alpha"][1] > cells["alpha"][3] == 0
    assert len(set(cells["hatch"][:3])) == 3
    assert cells["hatch"][0] == cells["hatch"][3] == cells["hatch"][4]
    assert len(plot.missing.data["left"]) == 3


def test_what_differs_is_marked_and_the_first_difference_has_a_band(snapshot):
    plot = plot_of(snapshot)
    top, bottom = plot.layout.cell_px(1)
    assert plot.differing.data["left"]
    assert all(top <= edge <= bottom for edge in plot.differing.data["top"])
    assert plot.band.data["left"] == [6.5]
    assert plot.band.data["label"] == ["first difference"]


def test_the_browser_asks_for_a_window_and_is_answered_last(snapshot):
    plot = plot_of(snapshot)
    plot.view.data = {"id": [5], "first": [0.5], "last": [4.5], "width_px": [400]}
    assert plot.response.data == {"id": [5]}
    assert {1, 2, 3, 4} <= set(plot.cells.data["number"])


def test_selecting_a_cell_describes_its_number_and_names_its_step(snapshot):
    diagnosis, rpc = snapshot.diagnosis, BrowserRpc()
    lanes = diagnosis.lanes(diagnosis.groups[0])
    order.connect_details(rpc, snapshot.trace, diagnosis, lanes, lanes.lanes_of((0, 1, 2)), (0, 7))
    details = rpc.sources["details"]
    assert (details.data["lane"], details.data["number"]) == ([0], [7])
    rpc.sources["selected"].data = {"lane": [1], "number": [9]}
    assert (details.data["lane"], details.data["number"], details.data["step"]) == ([1], [9], [2])
    assert details.data["markup"] == [render_number_details(snapshot.trace, diagnosis, lanes, 9)]


def test_jumps_lead_to_differences_and_steps(snapshot):
    plot = plot_of(snapshot)
    found = []
    for to, start in (("next", 1), ("previous", 9), ("previous", 7), ("step", 3)):
        plot.jump.data = {"id": [1], "to": [to], "from": [start]}
        found += plot.jumped.data["number"]
    assert found == [7, 8, None, 11]


def test_pointing_at_a_cell_reads_what_it_is_and_at_an_empty_one_that_it_never_came(snapshot):
    plot = plot_of(snapshot)
    plot.pointed.data = {"id": [1], "lane": [1], "number": [7]}
    assert plot.tooltip.data["title"][0] == "Rank 1 · #7"
    assert "all_reduce(sum) of 4,096 float32 (extra)" in plot.tooltip.data["value"]
    plot.pointed.data = {"id": [2], "lane": [0], "number": [13]}
    assert plot.tooltip.data["value"] == ["nothing: its log ends at #12"]


def test_text_is_left_out_where_there_is_no_room_for_it(snapshot):
    diagnosis = snapshot.diagnosis
    lanes = diagnosis.lanes(diagnosis.groups[0])
    window = lanes.window(lanes.folds, 1, 3)
    layout = OrderLayout(lanes=2)
    roomy, tight, none = (build_text_columns(window, layout, px)[0]["text"] for px in (80, 30, 8))
    assert roomy[:3] == ["bucket 0", "bucket 1", "bucket 2"]
    assert tight[:3] == ["b 0", "b 1", "b 2"]
    assert none == []


def test_labels_of_steps_that_would_run_into_each_other_are_left_out():
    window = Window(first=1, last=9, cells=(), steps=((1, 0), (4, 1), (7, 2)))
    assert build_step_columns(window, column_px=80)["label"] == ["step 0", "step 1", "step 2"]
    assert build_step_columns(window, column_px=10)["label"] == ["step 0", "", "step 2"]


def test_lines_of_code_are_side_by_side_with_that_of_the_rank_at_fault_first(tmp_path):
    found = RecordingCache(faulty(tmp_path / "traces")).latest().diagnosis
    sites = {rank: CallSite(file="/home/me/job/train.py", line=42 + (rank == 1), function="main") for rank in range(3)}
    verdict = replace(found.verdict, blamed=(1,), call_sites=sites)
    lines = list_code_lines(verdict)
    assert [(line.ranks, line.is_blamed) for line in lines] == [("Rank 1", True), ("Ranks 0, 2", False)]
    assert list_code_lines(replace(verdict, call_sites=dict.fromkeys(sites, sites[0]))) == []


def test_files_are_said_by_name_with_their_path_on_hover_and_their_folder_if_there_are_two():
    one = format_code("at /a/job/train.py:42 (main), `x < 1` and rank_0/events.log: gone")
    assert one == (
        'at <span class="file" title="/a/job/train.py">train.py</span>:42 (main), '
        "<code>x &lt; 1</code> and rank_0/events.log: gone"
    )
    two = re.sub("<[^>]+>", "", format_code("at /a/one/train.py:1 where others are at /a/two/train.py:2"))
    assert two == "at one/train.py:1 where others are at two/train.py:2"


def test_a_fault_that_stops_nothing_is_said_to_have_gone_on(tmp_path):
    found = RecordingCache(faulty(tmp_path / "traces")).latest().diagnosis
    silent = replace(found.verdict, kind="step behind", step=2)
    at_end = replace(found.evidence, ranks={0: RankEvidence(rank=0, position=RankPosition(step=9))})
    assert "from step 2 on" in describe_lasting_damage(silent, at_end)
    for verdict, step in ((silent, 2), (replace(silent, kind="stuck"), 9)):
        ranks = {0: RankEvidence(rank=0, position=RankPosition(step=step))}
        assert describe_lasting_damage(verdict, replace(found.evidence, ranks=ranks)) == ""
    swapped = describe_lasting_damage(replace(silent, kind="swapped collectives"), at_end)
    assert "what depends on these results is wrong from step 2 on" in swapped
    ended = {0: RankEvidence(rank=0, liveness="ended", steps_done=9, position=RankPosition(step=9))}
    assert list_rank_positions(replace(found.evidence, ranks=ended, expected_ranks=())) == [
        ("Rank 0", "ended, 9 steps done")
    ]


def test_a_number_of_another_log_is_not_marked_in_this_one(snapshot):
    diagnosis = snapshot.diagnosis
    lanes = diagnosis.lanes(diagnosis.groups[0])
    found = order.find_highlight(diagnosis, lanes)
    assert found is not None
    assert found[0] == 7
    diagnosis.verdict = replace(diagnosis.verdict, step=90)
    assert order.find_highlight(diagnosis, lanes) is None
