"""A rank that waits in ``init_process_group`` says who has not joined, and takes it back once they have."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from instrumented_ddp.watchdog import init_watch as module
from instrumented_ddp.watchdog.init_watch import watch_rendezvous
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.early_ends import EarlyEnd
from overlapscope.trace.environment import TRACE_VARIABLE
from overlapscope.trace.json_files import write_json
from overlapscope.trace.process_files import read_reports
from overlapscope.trace.schema import JOINING_FILE, REJOINING_FILE, REPORTS_FILE, SIGNATURES_FILE, rank_folder

LONG_S = 30.0
UNREACHABLE = "Gloo connectFullMesh failed with [...] SO_ERROR: Connection refused, remote=[127.0.0.1]:31643$1"


@pytest.fixture(autouse=True)
def _a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_calls", [])


def init_process_group(rank: int = -1, world_size: int = -1) -> None: ...


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a rank of this host is recorded that loses its patience at once."""
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(module, "_MIN_WAIT_S", 0.1)
    return tmp_path


def wait_for_report(trace: Path) -> dict:
    file = rank_folder(trace, 0) / REPORTS_FILE
    deadline_s = time.monotonic() + LONG_S
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < deadline_s, "nothing was reported"
        time.sleep(0.02)
    return json.loads(file.read_text().splitlines()[0])["verdict"]


def test_a_rank_that_comes_late_was_not_called_missing_for_good(trace: Path) -> None:
    with watch_rendezvous(init_process_group, (), {"rank": 0, "world_size": 2}):
        verdict = wait_for_report(trace)
    assert (verdict["kind"], verdict["suspected"]) == ("never started", [1])
    assert verdict["certainty"] == "likely"
    (report,) = read_reports({0: rank_folder(trace, 0)})
    assert report.retracted_ns is not None


def test_another_rank_that_failed_in_its_own_call_is_told_while_this_one_waits(trace: Path) -> None:
    first = {"rank": 1, "world_size": 2, "host": "node1", "pid": 7, "boot_id": "b", "time_ns": 1}
    failure = {"type": "RuntimeError", "message": UNREACHABLE, "traceback": "", "frames": (), "exit_frames": ()}
    with watch_rendezvous(init_process_group, (), {"rank": 0, "world_size": 2}):
        rank_folder(trace, 1).mkdir()
        write_json(rank_folder(trace, 1) / JOINING_FILE, first)
        ended = EarlyEnd(**(first | failure | {"exit_status": None, "exit_text": "", "time_ns": host_now_ns()}))
        write_json(trace / "early_end_node1_7.json", asdict(ended))
        verdict = wait_for_report(trace)
    assert (verdict["kind"], verdict["certainty"]) == ("failed", "certain")
    assert (verdict["blamed"], verdict["suspected"], verdict["concerned"]) == ([], [], [1])


def give_up(trace: Path) -> None:
    with watch_rendezvous(init_process_group, (), {"rank": 0, "world_size": 2}):
        wait_for_report(trace)
        raise TimeoutError


def test_who_gives_up_takes_nothing_back(trace: Path) -> None:
    with pytest.raises(TimeoutError):
        give_up(trace)
    (report,) = read_reports({0: rank_folder(trace, 0)})
    assert report.retracted_ns is None


def test_a_second_call_is_told_from_the_first_and_leaves_its_file_alone(trace: Path) -> None:
    folder = rank_folder(trace, 0)
    for call in range(3):
        with watch_rendezvous(init_process_group, (), {"rank": 0, "world_size": 2 + call}):
            current = module.get_latest_init_call()
            assert current is not None
            assert (current.number, current.has_joined) == (call + 1, False)
            if call:
                again = json.loads((folder / REJOINING_FILE).read_text())
                assert (again["call"], again["world_size"], again["has_joined"]) == (call + 1, 2 + call, False)
        assert json.loads((folder / JOINING_FILE).read_text())["world_size"] == 2
        (folder / SIGNATURES_FILE).touch()  # it has joined, and is recorded
    assert json.loads((folder / REJOINING_FILE).read_text())["has_joined"]


def test_a_call_again_after_one_that_has_failed_is_still_the_first(trace: Path) -> None:
    for world_size in (3, 2):
        with watch_rendezvous(init_process_group, (), {"rank": 0, "world_size": world_size}):
            pass
    assert json.loads((rank_folder(trace, 0) / JOINING_FILE).read_text())["world_size"] == 2
    assert not (rank_folder(trace, 0) / REJOINING_FILE).exists()
