"""From what ranks have left on disk to a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from overlapscope.diagnosis.evidence import CallSite, Evidence
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.json_files import dump_json_line, write_json
from overlapscope.trace.live_files import READY, GradientReadyFile, pack_liveness
from overlapscope.trace.process_files import StallSnapshot, write_stall_snapshot
from overlapscope.trace.schema import (
    EVENTS_FILE,
    LIVENESS_FILE,
    PARAMETERS_FILE,
    PLANS_FILE,
    REPORTS_FILE,
    RUN_FILE,
    UNREDUCED_FILE,
    Kind,
    Phase,
    pack_body,
    rank_folder,
)
from tests.ordered import BEGIN_NS, Collective, all_reduce, lives_here, make_folder, stands, steps, write_order


def evidence_of(folder: Path) -> Evidence:
    evidence, problems = read_evidence(folder)
    assert problems == []
    return evidence


def test_where_a_rank_stood_comes_from_its_newest_phase(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(3)}, close=False)
    stands(tmp_path, 0, Phase.BACKWARD, 3, launched=2)
    position = evidence_of(tmp_path).ranks[0].position
    assert position is not None
    assert (position.step, position.phase, position.bucket, position.since_ns) == (3, "backward", 2, 2 * BEGIN_NS)
    assert evidence_of(tmp_path).ranks[0].step_time_ns == 10**6
    assert evidence_of(tmp_path).ranks[0].steps_done == 3


@pytest.mark.parametrize("records", [100, 3000])
def test_the_newest_phase_is_found_in_a_ring_that_came_round(tmp_path: Path, records: int) -> None:
    make_folder(tmp_path, 0, 1)
    log = EventLogWriter(rank_folder(tmp_path, 0) / EVENTS_FILE, 4096 + 64 * 700)
    for step in range(records):
        log.append(pack_body(Kind.PHASE_BEGIN, index=Phase.FORWARD), step, step, step)
    position = evidence_of(tmp_path).ranks[0].position
    assert position is not None
    assert position.step == records - 1


def test_without_an_event_log_the_newest_collective_says_where_a_rank_stood(tmp_path: Path) -> None:
    write_order(tmp_path, {0: [Collective(signature=all_reduce(), step=7, line=88, phase=Phase.FORWARD)]}, close=False)
    position = evidence_of(tmp_path).ranks[0].position
    assert position is not None
    assert (position.step, position.phase, str(position.call_site)) == (7, "forward", "train.py:88 (main)")


def test_memory_and_silence_come_from_the_watchdogs_board(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)}, close=False)
    for rank, alive_ns in ((0, 9 * BEGIN_NS), (1, 6 * BEGIN_NS)):
        (rank_folder(tmp_path, rank) / LIVENESS_FILE).write_bytes(pack_liveness(alive_ns, 5, 100))
    ranks = evidence_of(tmp_path).ranks
    assert [(one.rss_bytes, one.memory_limit_bytes, one.silent_for_ns) for one in ranks.values()] == [
        (5, 100, 0),
        (5, 100, 3 * BEGIN_NS),
    ]


@pytest.mark.parametrize(("seen_after_ns", "is_known"), [(0, False), (10 * BEGIN_NS, True)])
def test_what_a_watchdog_saw_counts_until_something_happens(tmp_path: Path, seen_after_ns: int, is_known: bool) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    stacks = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in main\n'
    seen = StallSnapshot(
        time_ns=seen_after_ns,
        longest_recovered_stall_ns=7,
        cpu_share=0.5,
        is_working=True,
        has_begun_next_iteration=None,
        stacks=stacks,
    )
    write_stall_snapshot(rank_folder(tmp_path, 0), seen)
    one = evidence_of(tmp_path).ranks[0]
    assert (one.cpu_share, one.is_working, one.stacks) == ((0.5, True, stacks) if is_known else (None, None, ""))


def test_a_rank_that_has_launched_nothing_stands_where_its_watchdog_saw_it(tmp_path: Path) -> None:
    write_order(tmp_path, {0: [all_reduce()]}, members=(0, 1), close=False)
    folder = make_folder(tmp_path, 1, 2)
    lives_here(tmp_path, 1, 2**22, written_ns=BEGIN_NS)
    (folder / LIVENESS_FILE).write_bytes(pack_liveness(13 * BEGIN_NS, 5, 100))
    stacks = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in scan\n'
    seen = StallSnapshot(
        time_ns=12 * BEGIN_NS,
        longest_recovered_stall_ns=0,
        cpu_share=0.9,
        is_working=True,
        has_begun_next_iteration=None,
        stacks=stacks,
    )
    write_stall_snapshot(folder, seen)
    one = evidence_of(tmp_path).ranks[1]
    assert one.position is not None
    assert one.position.call_site == CallSite(file="/home/me/train.py", line=12, function="scan")
    assert (one.liveness, one.idle_ns) == ("gone", 12 * BEGIN_NS), "since it began"


def write_model(folder: Path, rank: int, ready: bytes) -> None:
    rank_dir = rank_folder(folder, rank)
    parameters = [["a.weight", [3, 4], "float32"], ["b.weight", [4], "float32"], ["b.bias", [4], "float32"]]
    line = {"model": 0, "class": "Net", "parameters": parameters, "frozen": [], "modules": {"a": "Linear", "b": "Norm"}}
    line |= {"settings": {}}
    (rank_dir / PARAMETERS_FILE).write_text(json.dumps(line) + "\n")
    buckets = [{"parameters": [{"name": "b.weight"}, {"name": "b.bias"}]}, {"parameters": [{"name": "a.weight"}]}]
    (rank_dir / PLANS_FILE).write_text(json.dumps({"model": 0, "epoch": 0, "hash": "x", "buckets": buckets}) + "\n")
    GradientReadyFile(rank_dir, 0, len(ready)).ready_ns[:] = memoryview(array("q", [READY * one for one in ready]))


def test_unready_parameters_are_named_with_module_and_bucket(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    write_model(tmp_path, 0, bytes([0, 1, 0]))
    rank = evidence_of(tmp_path).ranks[0]
    assert [(one.name, one.module, one.bucket) for one in rank.unready] == [
        ("a.weight", "a (Linear)", 1),
        ("b.bias", "b (Norm)", 0),
    ]
    assert rank.models[0].parameters[0] == ("a.weight", (3, 4), "float32")


def test_without_its_event_log_a_backward_may_have_been_over(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    write_model(tmp_path, 0, bytes([0, 1, 0]))
    path = rank_folder(tmp_path, 0) / RUN_FILE
    write_json(path, json.loads(path.read_text()) | {"models": [{"model": 0}]})
    evidence, _ = read_evidence(tmp_path)
    assert (evidence.ranks[0].unready, len(evidence.gaps)) == ((), 1)


@pytest.mark.parametrize("ready", [bytes(3), bytes([1, 1, 1])])
def test_a_backward_that_has_not_begun_or_has_ended_leaves_nothing_unready(tmp_path: Path, ready: bytes) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    write_model(tmp_path, 0, ready)
    assert evidence_of(tmp_path).ranks[0].unready == ()


def test_reports_that_were_taken_back_do_not_count(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    verdict = {"kind": "stopped", "sentence": "Rank 1 is stopped.", "blamed": [1]}
    lines = [
        {"report": n, "time_ns": n, "step": 0, "verdict": verdict, "message": "", "retracted_ns": retracted}
        for n, retracted in ((1, 5), (2, None))
    ]
    (rank_folder(tmp_path, 0) / REPORTS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(one.time_ns, one.kind, one.blamed) for one in evidence_of(tmp_path).reports] == [(2, "stopped", (1,))]


def test_an_update_with_gradients_of_one_rank_alone_is_read(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)})
    line = {"model": 0, "step": 12, "call_site": {"file": "train.py", "line": 20, "function": "main"}}
    (rank_folder(tmp_path, 0) / UNREDUCED_FILE).write_text(dump_json_line(line))
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.step) == ("not reduced", 12)


def test_an_unreduced_update_of_a_cause_that_only_a_later_version_knows_is_likely_a_fault(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)})
    line = {"model": 0, "step": 12, "call_site": None, "cause": "teleported"}
    (rank_folder(tmp_path, 0) / UNREDUCED_FILE).write_text(dump_json_line(line))
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.step, verdict.certainty) == ("not reduced", 12, "likely")


def test_a_cause_that_is_no_text_is_damage(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)})
    line = {"model": 0, "step": 12, "call_site": None, "cause": ["late"]}
    (rank_folder(tmp_path, 0) / UNREDUCED_FILE).write_text(dump_json_line(line))
    evidence, (problem,) = read_evidence(tmp_path)
    assert problem.severity == "error"
    assert judge(evidence).kind == "cannot tell"


def test_a_rank_without_a_folder_is_expected_all_the_same(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(2), 1: steps(2)}, members=(0, 1, 2))
    evidence = evidence_of(tmp_path)
    assert (evidence.expected_ranks, sorted(evidence.ranks)) == ((0, 1, 2), [0, 1])


def test_a_rank_that_died_before_its_first_collective_is_there(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)[:1]}, members=(0, 1), close=False)
    make_folder(tmp_path, 1, 2)
    assert evidence_of(tmp_path).ranks[1].liveness == "unknown"


def test_what_a_rank_does_between_steps_that_others_wait_for_is_not_known_without_stacks(tmp_path: Path) -> None:
    waiting = steps(2) + [Collective(signature=one.signature, step=2, state="launched") for one in steps(1)]
    write_order(tmp_path, {0: waiting, 1: steps(2), 2: waiting}, close=False)
    for rank in (0, 2):
        stands(tmp_path, rank, Phase.FINALIZE, 2)
    stands(tmp_path, 1, Phase.LOOP, 1)
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.suspected, verdict.step, verdict.number) == ("stuck", (1,), 2, 7)


def test_nothing_of_pandas_is_needed() -> None:
    code = (
        "import sys, overlapscope.diagnosis.from_recording, overlapscope.diagnosis.judge;"
        "import overlapscope.diagnosis.report_text;"
        "assert not {'pandas', 'pyarrow', 'rich', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_that_did_a_step_and_left_no_record_of_it_has_done_it(tmp_path: Path) -> None:
    """The record of a step is written as the next one begins."""
    write_order(tmp_path, {0: steps(3)})
    stands(tmp_path, 0, Phase.LOOP, 2)
    assert evidence_of(tmp_path).ranks[0].steps_done == 3
