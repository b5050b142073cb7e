"""Real trainings whose ranks have clocks of their own: what is recorded comes back onto one, within the stated error.

The one thing that is simulated is the clock: ``time.monotonic_ns`` of a rank is shifted by seconds and drifts by
100 ppm, and its boot identity is another. Processes, collectives, sockets and threads are real. A test with time
namespaces of the kernel simulates nothing at all; their clocks are shifted, and do not drift.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from overlapscope.trace.event_log import read_log
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import CLOCK_FILE, EVENTS_FILE, Kind, rank_folder
from tests.cluster.processes import Program, run_together
from tests.cluster.ranks import run_ranks
from tests.cluster.training_on_played_clock import real_times, train

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIME_LIMIT_S = 120
SECONDS = 2.5


Clock = tuple[int, float, str] | None
"""By how many nanoseconds it is ahead, how much faster it is, and of which boot; None for the host's."""


def training(folder: Path, world_size: int, clocks: dict[int, Clock], *ahead_s: int) -> Program:
    """The program that trains on these ranks of a job, which end when it has."""
    arguments = [str(folder), str(SECONDS), str(world_size), json.dumps(clocks), *map(str, ahead_s)]
    return Program(["-m", "tests.cluster.training_on_played_clock", *arguments], os.environ)


def assert_true_within_the_error(folder: Path, trace: Trace, rank: int, shift_ns: int = 0) -> None:
    """Every step of a rank began when its recording says, from the first to the last."""
    _, records, _ = read_log(rank_folder(trace.path, rank) / EVENTS_FILE)
    shown_ns = records["start_ns"][records["kind"] == Kind.STEP] - shift_ns
    true_ns = real_times(folder / f"truth_{rank}.json", shown_ns)
    placed_ns = trace.steps.loc[trace.steps["rank"] == rank, "start_ns"].to_numpy()
    error_ns = float(trace.ranks.set_index("rank")["error_ns"][rank])
    assert len(placed_ns) == len(true_ns) > 3
    assert np.abs(placed_ns - true_ns).max() <= error_ns


def reasons(trace: Trace, rank: int) -> list[str]:
    text = (rank_folder(trace.path, rank) / CLOCK_FILE).read_text()
    return [json.loads(line)["reason"] for line in text.splitlines()]


SHIFT_NS = 3_000_000_000


@pytest.fixture(scope="module")
def of_four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training of five ranks: three on hosts of their own, whose clocks drift apart, two on another.

    These two play their clocks from one beginning, as processes of one host would: with no drift, a shift is enough.
    """
    folder = tmp_path_factory.mktemp("of_four_hosts")
    clocks: dict[int, Clock] = {0: None, 1: (SHIFT_NS, 100e-6, "host 1"), 2: (-SHIFT_NS, -100e-6, "host 2")}
    clocks |= dict.fromkeys((3, 4), (7_000_000_000, 0.0, "host 3"))
    run_together([training(folder, 5, clocks)], TIME_LIMIT_S, "forkserver")
    return folder


def test_shifted_and_drifting_clocks_are_recovered_within_the_stated_error(of_four_hosts: Path) -> None:
    trace = read_trace(of_four_hosts / "traces")
    assert trace.problems == ()
    assert trace.ranks["clock"].tolist() == ["same boot", *["pings"] * 4]
    assert 0 < trace.clock_error_ns < 50_000_000
    for rank in range(5):
        assert_true_within_the_error(of_four_hosts, trace, rank)
    for rank in (1, 2):
        found = reasons(trace, rank)
        assert found[0] == "start"
        assert found[-1] in ("end", "periodic"), "rank 0 may be gone before the others have pinged it a last time"
        assert "rebuild" in found
    first_ns, last_ns = (trace.collectives.groupby(["step", "bucket"])[name] for name in ("end_ns", "launch_ns"))
    assert (first_ns.min() + 2 * trace.clock_error_ns >= last_ns.max()).all()


def test_without_pings_the_all_reduces_of_a_training_recover_the_clocks(of_four_hosts: Path, tmp_path: Path) -> None:
    traces = shutil.copytree(of_four_hosts / "traces", tmp_path / "traces")
    for path in traces.glob(f"rank_*/{CLOCK_FILE}"):
        path.unlink()
    trace = read_trace(traces)
    assert trace.ranks["clock"].tolist() == ["same boot", *["collectives"] * 4]
    for rank in range(1, 5):
        assert_true_within_the_error(of_four_hosts, trace, rank)


def test_of_the_ranks_of_a_host_one_reports_for_all(of_four_hosts: Path) -> None:
    reports = [(rank_folder(of_four_hosts / "traces", rank) / CLOCK_FILE).exists() for rank in range(5)]
    assert (reports[:3], sum(reports[3:])) == ([False, True, True], 1)


def test_ranks_of_one_boot_ping_nobody(tmp_path: Path) -> None:
    assert run_ranks(train, 2, tmp_path / "traces", 0.5) == [None, None]
    trace = read_trace(tmp_path / "traces")
    assert trace.ranks["clock"].tolist() == ["same boot", "same boot"]
    assert trace.clock_error_ns == 0
    assert list(trace.path.glob(f"rank_*/{CLOCK_FILE}")) == []


AHEAD_S = 1000


def has_time_namespaces() -> bool:
    try:
        command = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", str(AHEAD_S), "true"]
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not has_time_namespaces(), reason="no time namespace can be made here (needs root and Linux 5.6)")
def test_equal_boot_ids_in_different_time_namespaces_are_different_clocks(tmp_path: Path) -> None:
    programs = [training(tmp_path, 2, {0: None}), training(tmp_path, 2, {1: None}, AHEAD_S)]
    run_together(programs, TIME_LIMIT_S, "forkserver")
    trace = read_trace(tmp_path / "traces")
    first, second = trace.ranks["boot"]
    assert second.startswith(f"{first} time:[")
    assert trace.ranks["clock"].tolist() == ["same boot", "pings"]
    assert abs(trace.ranks["offset_ns"][1] + AHEAD_S * 1_000_000_000) <= trace.clock_error_ns
    assert_true_within_the_error(tmp_path, trace, 1, shift_ns=AHEAD_S * 1_000_000_000)
