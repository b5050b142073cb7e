"""What is known about a rank that has not answered: from its heartbeat, from /proc, and from its launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from instrumented_ddp.watchdog.investigation import (
    Inspector,
    RankKnowledge,
    add_older_entries,
    make_evidence,
    read_snapshot,
)
from instrumented_ddp.watchdog.process_state import GONE, ProcessState, read_process_state
from instrumented_ddp.watchdog.protocol import Alarm, Heartbeat, Investigation
from overlapscope.diagnosis.evidence import Failure, Liveness, RankEvidence, RankPosition
from overlapscope.diagnosis.rank_snapshot import RankSnapshot
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.live_files import FingerprintFile
from overlapscope.trace.schema import REPLICAS_FILE, rank_folder
from tests.diagnosis.jobs import entry, group, job, rank, trained
from tests.ordered import Collective, all_reduce, steps, write_order

OWN = RankEvidence(rank=0, host="a", pid=1, position=RankPosition(step=3, phase="loop"), steps_done=3)
HEARTBEAT = Heartbeat(evidence=OWN, host_id="a", start_ticks=1, time_ns=1)


def known(state: str, snapshot: RankSnapshot | None = None, heartbeat: Heartbeat = HEARTBEAT) -> RankEvidence:
    process = ProcessState(state=state)
    one = RankKnowledge(
        snapshot=snapshot, has_answered=False, heartbeat=heartbeat, silent_ns=60 * 10**9, process=process
    )
    return make_evidence(2, {0: one}, []).ranks[0]


def test_a_rank_that_is_gone_did_not_stall_since_then() -> None:
    one = known(GONE)
    assert (one.liveness, one.idle_ns, one.silent_for_ns) == ("gone", None, 60 * 10**9)


def test_the_exit_status_is_known_from_the_launcher() -> None:
    by_itself = RankSnapshot(evidence=RankEvidence(rank=0, exit_status=0))
    by_signal = RankSnapshot(evidence=RankEvidence(rank=0, exit_status=-9))
    assert known(GONE, by_itself).liveness == "ended"
    assert (known(GONE, by_signal).liveness, known(GONE, by_signal).exit_status) == ("gone", -9)


def test_a_rank_that_is_there_and_silent_has_stalled() -> None:
    one = known("S")
    assert (one.liveness, one.idle_ns, one.holds_gil) == ("sleeping", 60 * 10**9, True)
    assert one.position == OWN.position


def test_a_heartbeat_is_more_recent_than_the_files_of_its_rank() -> None:
    failure = Failure(type="ValueError", message="nan")
    last = Heartbeat(
        evidence=RankEvidence(rank=0, liveness="failed", failure=failure, rss_bytes=7),
        host_id="a",
        start_ticks=1,
        time_ns=1,
    )
    one = known(GONE, RankSnapshot(evidence=RankEvidence(rank=0, steps_done=5, rss_bytes=5)), last)
    assert (one.liveness, one.failure, one.rss_bytes, one.steps_done) == ("failed", failure, 7, 5)


def test_a_difference_older_than_the_snapshots_is_read_from_the_files_if_all_are_here(tmp_path: Path) -> None:
    order = [*steps(5, buckets=1), all_reduce(), *steps(95, first=5, buckets=1)]
    snapshots = [trained(90)[80:], trained(90)[80:]]
    late = group(dict(enumerate(snapshots)), first_divergence=81, divergence="step", predates_log=True)
    write_order(tmp_path, {0: order}, members=(0, 1))
    assert add_older_entries(tmp_path, job(groups=[late])) == (late,), "rank 1 is on another host"
    write_order(tmp_path, {1: steps(100, buckets=1)}, members=(0, 1))
    (found,) = add_older_entries(tmp_path, job(groups=[late]))
    assert (found.first_divergence, found.divergence, found.predates_log) == (6, "signature", False)
    assert found.latest == late.latest
    same = replace(late, first_divergence=None, divergence=None, predates_log=False)
    assert add_older_entries(tmp_path, job(groups=[same])) == (same,)


@pytest.mark.parametrize(("liveness", "number"), [("failed", 11), ("gone", 11), ("sleeping", None), ("ended", None)])
def test_an_older_difference_is_looked_for_once_a_rank_has_failed(
    tmp_path: Path, liveness: Liveness, number: int | None
) -> None:
    skipped = [replace(each, batch=(each.batch or 0) + 1) for each in steps(20, first=10, buckets=1)]
    write_order(tmp_path, {0: steps(30, buckets=1), 1: [*steps(10, buckets=1), *skipped]})
    latest = group({0: trained(30)[-2:], 1: trained(30)[-2:]})
    evidence = job(rank(0), rank(1, liveness), groups=[latest])
    (found,) = add_older_entries(tmp_path, evidence)
    assert (found.first_divergence, found.latest) == (number, latest.latest)


def test_a_step_that_was_left_out_is_found_in_the_files(tmp_path: Path) -> None:
    def averaged(*steps: Iterable[int]) -> list[Collective]:
        return [Collective(signature=all_reduce("gradient", 100), step=step) for step in chain(*steps)]

    orders = {0: [*averaged(range(50))], 1: [*averaged(range(10), range(11, 50)), Collective(signature=all_reduce())]}
    write_order(tmp_path, orders)
    windows = {0: [entry(50, all_reduce("gradient", 100), step=49)], 1: [entry(50, all_reduce(), step=49)]}
    late = group(windows, first_divergence=50, divergence="signature", predates_log=True)
    (found,) = add_older_entries(tmp_path, job(groups=[late]))
    assert (found.first_divergence, found.divergence, found.predates_log) == (11, "step", False)


def write_replica(folder: Path, differs_at: int) -> None:
    """Write what a rank has recorded of one tensor in 60 steps, with other values from some step on."""
    line = {
        "model": 0,
        "key": "a.0",
        "class": "Net",
        "ranks": [0, 1, 2],
        "processor": "",
        "tensors": [["weight", "trained"]],
        "numbers": [0],
        "left_out": [],
    }
    (folder / REPLICAS_FILE).write_text(json.dumps(line) + "\n")
    file = FingerprintFile(folder, 0, 1)
    for step in range(60):
        value = 1 + step + 1000 * (step >= differs_at)
        file.add(1, step, np.array([step], "<u4").tobytes(), np.array([value], "<i8").tobytes())


@pytest.mark.parametrize("liveness", ["sleeping", "ended"])
@pytest.mark.parametrize(("late_has_recorded", "blamed"), [(True, (1,)), (False, ())])
def test_fingerprints_of_a_rank_that_has_not_answered_are_read_from_its_files(
    tmp_path: Path, *, late_has_recorded: bool, blamed: tuple[int, ...], liveness: Liveness
) -> None:
    """Ranks 0 and 1 alone can't tell which of them differs; rank 2 is late, or the first to reach the job's end."""
    write_order(tmp_path, dict.fromkeys(range(3), steps(60, buckets=1)), close=False)
    for rank_number in (0, 1, 2) if late_has_recorded else (0, 1):
        write_replica(rank_folder(tmp_path, rank_number), differs_at=30 if rank_number == 1 else 60)
    snapshots = {}
    for rank_number in (0, 1):
        snapshot = read_snapshot(tmp_path, rank_number, {}, with_fingerprints=True)
        assert snapshot is not None
        snapshots[rank_number] = replace(snapshot, evidence=replace(snapshot.evidence, liveness="sleeping"))
    late = Heartbeat(
        evidence=RankEvidence(rank=2, pid=os.getpid(), liveness=liveness),
        host_id="a",
        start_ticks=read_process_state(os.getpid()).start_ticks,
        time_ns=host_now_ns(),
    )
    case = Investigation(
        number=1, alarm=Alarm(by=0, why="replicas differ"), began_s=0.0, snapshots=snapshots, heartbeats={2: late}
    )
    verdict = Inspector(tmp_path, "a").judge(case, [], 0, 3).verdict
    assert (verdict.kind, verdict.blamed) == ("replicas differ", blamed)
