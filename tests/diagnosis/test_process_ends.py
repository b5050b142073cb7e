"""How processes have ended, or whether they are still there, from what they and their launcher have left on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlapscope.diagnosis.judge import judge
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.json_files import write_json
from overlapscope.trace.process_files import write_exit
from overlapscope.trace.schema import ENDED_FILE, EVENTS_FILE, RANK_FILE, Kind, Phase, pack_body, rank_folder
from tests.diagnosis.test_from_logs import evidence_of
from tests.ordered import BEGIN_NS, Collective, all_reduce, end, fail, lives_here, stands, steps, write_order


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is there and sleeps."""
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    assert sleeping.stdout is not None
    sleeping.stdout.read(1)
    yield sleeping
    sleeping.kill()
    sleeping.wait()
    sleeping.stdout.close()


def test_how_a_process_ended_is_what_it_has_said(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1), 2: steps(1)}, close=False)
    end(tmp_path, [0])
    fail(tmp_path, 1, "ValueError", "no such label", line=7)
    ranks = evidence_of(tmp_path).ranks
    assert [ranks[n].liveness for n in range(3)] == ["ended", "failed", "unknown"]
    failure = ranks[1].failure
    assert failure is not None
    assert (failure.type, failure.message, str(failure.call_site)) == (
        "ValueError",
        "no such label",
        "train.py:7 (main)",
    )


def test_how_a_process_ended_is_unknown_without_its_record(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)}, close=True)
    assert evidence_of(tmp_path).ranks[0].liveness == "unknown"


@pytest.mark.parametrize(("how", "liveness"), [("unrecorded", "unknown"), ("ended", "ended"), ("exception", "failed")])
def test_closed_logs_of_a_recording_that_ended_early_say_nothing_of_the_process(
    tmp_path: Path, how: str, liveness: str
) -> None:
    write_order(tmp_path, {0: steps(1)}, close=True)
    write_json(rank_folder(tmp_path, 0) / ENDED_FILE, {"how": how, "unrecorded_because": "no space", "time_ns": 1})
    one = evidence_of(tmp_path).ranks[0]
    assert (one.liveness, one.unrecorded_because) == (liveness, "no space")


def test_of_a_process_of_this_host_the_kernel_is_asked(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    def becomes(liveness: str) -> bool:
        until = time.monotonic() + 10
        while (is_so := evidence_of(tmp_path).ranks[0].liveness == liveness) is False and time.monotonic() < until:
            time.sleep(0.01)
        return is_so

    write_order(tmp_path, {0: steps(1)}, close=False)
    lives_here(tmp_path, 0, process.pid)
    assert becomes("sleeping")
    process.send_signal(19)
    assert becomes("stopped")
    process.kill()
    process.wait()
    assert evidence_of(tmp_path).ranks[0].liveness == "gone"


def test_a_later_process_of_the_same_number_is_not_taken_for_it(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    lives_here(tmp_path, 0, process.pid, written_ns=1)
    assert evidence_of(tmp_path).ranks[0].liveness == "gone"


def test_of_a_process_elsewhere_nothing_is_known(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    lives_here(tmp_path, 0, os.getpid())
    path = rank_folder(tmp_path, 0) / RANK_FILE
    write_json(path, json.loads(path.read_text()) | {"host": "another"})
    assert evidence_of(tmp_path).ranks[0].liveness == "unknown"


@pytest.mark.parametrize(("told_s", "is_told"), [(8, True), (12, False)])
def test_a_rank_that_was_about_to_exit_was_not_ended_by_its_launcher(
    tmp_path: Path, told_s: int, is_told: bool
) -> None:
    write_order(tmp_path, {0: steps(2), 1: steps(2)})
    lives_here(tmp_path, 0, 2**22 - 1)
    write_json(tmp_path / "rank_0" / ENDED_FILE, {"how": "ended", "time_ns": 10 * BEGIN_NS, "exit_status": 3})
    write_exit(tmp_path, 2**22 - 1, -15, signaled_at_ns=told_s * BEGIN_NS, signal_received=15)
    one = evidence_of(tmp_path).ranks[0]
    assert (one.was_signaled, one.signal_received) == ((True, 15) if is_told else (False, None))
    assert one.exit_status == (-15 if is_told else 3)


@pytest.mark.parametrize(("told_s", "is_told"), [(8, True), (12, False)])
def test_an_exit_after_the_whole_job_was_told_to_end_is_no_fault_of_its_rank(
    tmp_path: Path, told_s: int, is_told: bool
) -> None:
    """As of a data loader whose workers got the signal too; the launcher was killed before it saw the rank's end."""
    write_order(tmp_path, {0: steps(2)})
    lives_here(tmp_path, 0, 2**22 - 1)
    caught = {"type": "RuntimeError", "message": "DataLoader worker (pid 5357) is killed by signal: Terminated."}
    ended = {"how": "ended", "time_ns": 10 * BEGIN_NS, "exit_status": 1, "caught": caught}
    write_json(tmp_path / "rank_0" / ENDED_FILE, ended)
    write_exit(tmp_path, 2**22 - 2, -9, signaled_at_ns=told_s * BEGIN_NS, signal_received=15, is_command=True)
    evidence = evidence_of(tmp_path)
    assert evidence.ranks[0].was_signaled == is_told
    assert (judge(evidence).kind == "failed") == (not is_told)


@pytest.mark.parametrize(("waited_s", "kind"), [(22, "stuck"), (1, "interrupted")])
def test_a_wait_that_ctrl_c_ended_was_a_wait_until_then(tmp_path: Path, waited_s: int, kind: str) -> None:
    """Processes of torch.multiprocessing.spawn pass over a ``KeyboardInterrupt``, and exit with 0."""
    begin_ns, signaled_at_ns = 10 * BEGIN_NS, 10 * BEGIN_NS + waited_s * 10**9
    waiting = Collective(signature=all_reduce(), step=2, state="failed", now_ns=begin_ns)
    write_order(tmp_path, {0: [*steps(2), waiting], 1: steps(2)})
    for rank in (0, 1):
        lives_here(tmp_path, rank, 2**22 - 1 - rank, written_ns=BEGIN_NS)
        write_json(rank_folder(tmp_path, rank) / ENDED_FILE, {"how": "ended", "time_ns": signaled_at_ns + 10**6})
        write_exit(tmp_path, 2**22 - 1 - rank, 0)
    stands(tmp_path, 1, Phase.OPTIMIZER, 2, since_ns=begin_ns)
    log = EventLogWriter(rank_folder(tmp_path, 0) / EVENTS_FILE, 2**20)
    log.append(pack_body(Kind.PHASE_BEGIN, index=Phase.FINALIZE), 2, begin_ns + 1, begin_ns + 1)
    log.append(pack_body(Kind.PHASE, index=Phase.FINALIZE), 2, begin_ns + 1, signaled_at_ns + 10**6)
    log.close()
    write_exit(tmp_path, 2**22 - 3, -2, signaled_at_ns=signaled_at_ns, signal_received=2, is_command=True)
    verdict = judge(evidence_of(tmp_path))
    assert verdict.kind == kind
    if kind == "stuck":
        assert (verdict.suspected, verdict.number) == ((1,), 7)


@pytest.mark.parametrize(("status", "liveness"), [(0, "ended"), (-9, "gone")])
def test_a_rank_that_left_without_a_word_has_ended_if_its_launcher_says_so(
    tmp_path: Path, status: int, liveness: str
) -> None:
    """``os._exit(0)`` closes no log."""
    write_order(tmp_path, {0: steps(2), 1: steps(2)}, close=False)
    lives_here(tmp_path, 0, 2**22 - 1)
    write_exit(tmp_path, 2**22 - 1, status)
    assert evidence_of(tmp_path).ranks[0].liveness == liveness


@pytest.mark.parametrize("kind", [Kind.PAUSE, Kind.INCIDENT])
def test_what_is_written_while_nothing_goes_on_does_not_end_a_standstill(
    tmp_path: Path, process: subprocess.Popen[bytes], kind: Kind
) -> None:
    write_order(tmp_path, {0: steps(1)}, close=False)
    lives_here(tmp_path, 0, process.pid)
    now_ns = time.monotonic_ns()
    log = EventLogWriter(rank_folder(tmp_path, 0) / EVENTS_FILE, 2**20)
    log.append(pack_body(Kind.PHASE_BEGIN, index=Phase.FORWARD), 1, now_ns - 20 * 10**9, now_ns - 20 * 10**9)
    log.append(pack_body(kind), 1, now_ns, now_ns)
    idle_ns = evidence_of(tmp_path).ranks[0].idle_ns
    assert idle_ns is not None
    assert idle_ns >= 20 * 10**9
