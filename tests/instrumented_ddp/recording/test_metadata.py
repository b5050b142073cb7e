"""A process finds out which attempt of its job it belongs to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instrumented_ddp.recording.metadata import find_attempt_folder, has_attempt_ended
from overlapscope.diagnosis.process_state import read_process_start_ns
from overlapscope.trace import clocks
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import ENDED_FILE, JOINING_FILE, rank_folder

GONE = 2**22 - 1
"""Larger than any process number."""
SECOND_NS = 10**9


@pytest.fixture
def running() -> Iterator[int]:
    """The number of another process, which runs."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def joins(attempt: Path, rank: int, pid: int, *, time_ns: int, **where: Any) -> Path:
    """A process has come to init_process_group."""
    folder = rank_folder(attempt, rank)
    folder.mkdir(parents=True, exist_ok=True)
    here = {"host": socket.gethostname(), "boot_id": clocks.get_boot_id(), "pid": pid, "time_ns": time_ns}
    write_json(folder / JOINING_FILE, here | where)
    return folder


def this_read_process_start_ns() -> int:
    began = read_process_start_ns()
    assert began is not None
    return began


def test_when_a_process_began_is_known() -> None:
    assert 0 <= clocks.host_now_ns() - this_read_process_start_ns() < 24 * 3600 * SECOND_NS
    code = (
        "import time; from overlapscope.diagnosis.process_state import read_process_start_ns; "
        "age_ns = time.monotonic_ns() - read_process_start_ns(); assert 0 <= age_ns < 60e9, age_ns"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ranks_that_come_at_the_same_time_are_of_one_attempt(tmp_path: Path, running: int) -> None:
    assert not has_attempt_ended(tmp_path, 0, 5)
    joins(tmp_path, 0, running, time_ns=clocks.host_now_ns())
    assert not has_attempt_ended(tmp_path, 1, clocks.host_now_ns())


def test_a_rank_that_another_process_has_been_is_of_the_next(tmp_path: Path) -> None:
    joins(tmp_path, 0, GONE, time_ns=SECOND_NS)
    assert has_attempt_ended(tmp_path, 0, None)
    joins(tmp_path, 1, 1, time_ns=SECOND_NS, host="elsewhere")
    assert has_attempt_ended(tmp_path, 1, None)


def test_a_rank_that_begins_after_the_end_of_another_is_of_the_next(tmp_path: Path) -> None:
    """Although no process has been this rank: it died before it came so far."""
    folder = joins(tmp_path, 0, GONE, time_ns=10 * SECOND_NS)
    assert not has_attempt_ended(tmp_path, 1, 9 * SECOND_NS)  # it was there before: both were started together
    assert has_attempt_ended(tmp_path, 1, 11 * SECOND_NS)
    write_json(folder / ENDED_FILE, {"how": "ended", "time_ns": 20 * SECOND_NS})
    assert not has_attempt_ended(tmp_path, 1, 19 * SECOND_NS)
    assert has_attempt_ended(tmp_path, 1, 21 * SECOND_NS)


def test_as_long_as_one_of_its_ranks_is_there_an_attempt_goes_on(tmp_path: Path, running: int) -> None:
    joins(tmp_path, 0, GONE, time_ns=SECOND_NS)
    joins(tmp_path, 1, running, time_ns=clocks.host_now_ns())
    assert not has_attempt_ended(tmp_path, 0, clocks.host_now_ns())
    assert not has_attempt_ended(tmp_path, 2, clocks.host_now_ns())


def test_of_ranks_elsewhere_nothing_is_concluded(tmp_path: Path) -> None:
    joins(tmp_path, 0, 1, time_ns=SECOND_NS, host="elsewhere")
    assert not has_attempt_ended(tmp_path, 1, 11 * SECOND_NS)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run under ``overlapscope record``, with a first attempt that is over."""
    monkeypatch.setenv("OVERLAPSCOPE_TRACE", str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    joins(tmp_path, 0, GONE, time_ns=SECOND_NS)
    return tmp_path


def test_the_next_attempt_has_a_folder_inside_and_keeps_it(recorded: Path) -> None:
    assert find_attempt_folder(recorded, 0) == recorded / "restart_1"
    joins(recorded / "restart_1", 0, os.getpid(), time_ns=clocks.host_now_ns())
    assert find_attempt_folder(recorded, 0) == recorded / "restart_1"
    assert find_attempt_folder(recorded, 1) == recorded / "restart_1"


def test_torchruns_count_is_the_number_where_attempts_have_left_nothing(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert find_attempt_folder(recorded, 0) == recorded / "restart_3"


def test_the_first_attempt_that_is_recorded_has_the_folder_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAPSCOPE_TRACE", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert find_attempt_folder(tmp_path, 0) == tmp_path


def test_a_folder_that_the_script_names_is_only_shared_by_restarts(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERLAPSCOPE_TRACE")
    assert find_attempt_folder(recorded, 0) == recorded  # which refuses: it may be the run of another day
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_attempt_folder(recorded, 0) == recorded / "restart_1"
