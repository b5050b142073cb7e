"""What the machine says is read from the kernel and NVML, written when it changes, by one rank of those it concerns."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from instrumented_ddp.machine.sampler import MachineSampler
from instrumented_ddp.machine.source import Roots
from overlapscope.errors import Problem
from overlapscope.trace.machine_facts import find_fact
from overlapscope.trace.machine_log import MachineLog, read_machine_log
from overlapscope.trace.schema import MACHINE_FILE
from tests.fake_nvml.playing import UUID, play_gpu
from tests.instrumented_ddp.machine.trees import cpu_stat, make_host, pressure, write


def logged(folder: Path) -> MachineLog:
    """What the rank has written, in full and in order."""
    problems: list[Problem] = []
    found = read_machine_log(folder, problems)
    assert not problems
    return found


def last(log: MachineLog, kind: str) -> dict[str, float]:
    """The latest value of each fact of a kind of source."""
    return {one.name: one.value for one in log.readings if one.source.startswith(f"{kind} ") and one.name}


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return make_host(tmp_path / "host")


@pytest.fixture
def rank_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "rank_0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake NVML that knows the GPU of this process."""
    return play_gpu(monkeypatch)


def test_the_first_sample_has_every_fact_of_the_machine(roots, rank_dir):
    sampler = MachineSampler(rank_dir, roots)
    sampler.run()
    log = logged(rank_dir)
    assert last(log, "cgroup")["cpu_quota"] == 0.5, "that of the group around the rank's"
    assert last(log, "cgroup")["memory_limit_bytes"] == 1024**3
    assert last(log, "process") == {"peak_memory_bytes": 2 * 1024**2, "swapped_bytes": 0, "queued_ns": 2000}
    assert last(log, "host")["cpu_pressure_us"] == 1000
    assert last(log, "net")["speed_mbit_per_s"] == 10_000
    assert last(log, "ib") == {"errors": 3, "link_downs": 0, "rate_gbit_per_s": 200}
    assert {one.label for one in log.sources} >= {"eth0", "mlx5_0/1"}
    assert "lo" not in {one.label for one in log.sources}
    assert all(find_fact(one.source, one.name) for one in log.readings), "readers know every fact that is written"


def test_only_what_has_changed_is_written_again(roots, rank_dir, tmp_path):
    sampler = MachineSampler(rank_dir, roots)
    sampler.run()
    first = len(logged(rank_dir).readings)
    sampler.run()
    assert len(logged(rank_dir).readings) == first
    write(tmp_path / "host/sys/fs/cgroup/job.slice", {"cpu.stat": cpu_stat(110, 4)})
    write(tmp_path / "host/proc/pressure", {"cpu": pressure(1005)})  # less than is worth a line
    sampler.run()
    new = logged(rank_dir).readings[first:]
    assert {one.name: one.value for one in new} == {"cpu_periods": 110, "cpu_throttled_periods": 4}
    assert all(one.since_ns < one.time_ns for one in new), "it happened since the sample before"
    sampler.end()


def test_one_of_two_ranks_samples_what_they_share_and_the_other_goes_on_when_it_is_gone(roots, rank_dir, tmp_path):
    other_dir = rank_dir.parent / "rank_1"
    other_dir.mkdir()
    first, second = MachineSampler(rank_dir, roots), MachineSampler(other_dir, roots)

    def throttled(periods: int) -> list[list[float]]:
        """What each has written of the counter after it has changed."""
        write(tmp_path / "host/sys/fs/cgroup/job.slice", {"cpu.stat": cpu_stat(200, periods)})
        first.run()
        second.run()
        logs = logged(rank_dir), logged(other_dir)
        return [[one.value for one in log.readings if one.name == "cpu_throttled_periods"] for log in logs]

    assert throttled(1) == [[1], [1]], "both read it once"
    assert throttled(2) == [[1, 2], [1]]
    assert {one.source for one in logged(other_dir).sources} == {one.source for one in logged(rank_dir).sources}
    first.end()
    assert throttled(5) == [[1, 2], [1, 5]], "what has happened since it looked first"
    second.end()


def test_version_1_of_control_groups_is_read(rank_dir, tmp_path):
    roots = Roots(proc=tmp_path / "proc", sys=tmp_path / "sys")
    write(tmp_path / "proc", {"self/cgroup": "4:memory:/pod/a\n1:cpu,cpuacct:/pod/a\n0::/\n"})
    group = {
        "cpu.cfs_quota_us": "150000\n",
        "cpu.cfs_period_us": "100000\n",
        "cpu.stat": "nr_periods 9\nnr_throttled 2\n",
    }
    write(tmp_path / "sys/fs/cgroup/cpu", group)  # in a container its own group is mounted here
    write(
        tmp_path / "sys/fs/cgroup/memory", {"memory.limit_in_bytes": "9223372036854771712\n", "memory.failcnt": "7\n"}
    )
    sampler = MachineSampler(rank_dir, roots)
    sampler.run()
    sampler.end()
    found = last(logged(rank_dir), "cgroup")
    assert found == {"cpu_periods": 9, "cpu_throttled_periods": 2, "cpu_quota": 1.5, "memory_limit_hits": 7}


def test_a_machine_that_says_nothing_is_no_error(rank_dir, tmp_path):
    sampler = MachineSampler(rank_dir, Roots(proc=tmp_path / "none", sys=tmp_path / "none"))
    assert sampler.run() > 0
    sampler.end()
    log = logged(rank_dir)
    assert not [one for one in log.readings if one.name]
    assert {one.facts for one in log.sources if one.why} == {"all"}


def test_a_gpu_is_read_through_nvml(nvml, roots, rank_dir):
    sampler = MachineSampler(rank_dir, roots)
    sampler.use_device(torch.device("cuda", 0))
    sampler.run()
    found = last(logged(rank_dir), "gpu")
    assert (found["sm_clock_mhz"], found["max_sm_clock_mhz"], found["power_w"]) == (1950, 1980, 600)
    assert (found["nvlinks"], found["nvlinks_active"], found["pcie_width"]) == (4, 3, 16)
    assert [one.label for one in logged(rank_dir).sources if one.source == f"gpu {UUID}"] == ["NVIDIA H100 80GB HBM3"]
    nvml.GPUS[UUID] |= {"ClockInfo": 1200, "CurrentClocksEventReasons": 0x20, "Xids": [13, 79]}
    sampler.run()
    log = logged(rank_dir)
    assert last(log, "gpu")["clock_limits"] == 0x20
    assert [one.value for one in log.readings if one.name == "xid"] == [13, 79]
    sampler.end()
    assert nvml.CALLS[-1] == "Shutdown"


def test_what_a_gpu_does_not_support_is_asked_for_once_and_said_once(nvml, roots, rank_dir):
    for name in ("TotalEccErrors0", "TotalEccErrors1", "NvLinkState", "Xids"):
        del nvml.GPUS[UUID][name]
    sampler = MachineSampler(rank_dir, roots)
    sampler.use_device(torch.device("cuda", 0))
    for _ in range(3):
        sampler.run()
    assert nvml.CALLS.count("TotalEccErrors0") == 1
    (said,) = [one for one in logged(rank_dir).sources if one.why]
    assert (said.source, said.why) == (f"gpu {UUID}", "Not Supported")
    assert set(said.facts.split(", ")) == {"ecc_corrected", "ecc_uncorrected", "xid"}
    assert last(logged(rank_dir), "gpu")["sm_clock_mhz"] == 1950
    sampler.end()


def test_a_gpu_that_is_lost_is_an_event_and_the_rest_goes_on(nvml, roots, rank_dir, tmp_path):
    sampler = MachineSampler(rank_dir, roots)
    sampler.use_device(torch.device("cuda", 0))
    sampler.run()
    nvml.GPUS[UUID]["lost"] = True
    sampler.run()
    write(tmp_path / "host/sys/fs/cgroup/job.slice", {"cpu.stat": cpu_stat(110, 4)})
    sampler.run()
    sampler.end()
    log = logged(rank_dir)
    assert last(log, "gpu")["lost"] == 1
    assert last(log, "cgroup")["cpu_periods"] == 110


def test_a_gpu_without_the_package_is_said_and_the_rest_is_read(monkeypatch, roots, rank_dir):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    sampler = MachineSampler(rank_dir, roots)
    sampler.use_device(torch.device("cuda", 0))
    sampler.run()
    sampler.end()
    (said,) = [one for one in logged(rank_dir).sources if one.why]
    assert said.source == "gpu"
    assert "nvidia-ml-py" in said.why
    assert last(logged(rank_dir), "host")


def test_a_full_disk_costs_a_sample_and_no_more(roots, rank_dir):
    sampler = MachineSampler(rank_dir, roots)
    sampler.run()
    before = logged(rank_dir)
    (rank_dir / MACHINE_FILE).rename(rank_dir / "kept")
    (rank_dir / MACHINE_FILE).mkdir()  # can't be appended to, as on a full disk
    sampler.run()
    sampler.end()
    (rank_dir / MACHINE_FILE).rmdir()
    os.rename(rank_dir / "kept", rank_dir / MACHINE_FILE)
    assert logged(rank_dir) == before


def test_of_a_long_file_the_ends_and_rare_facts_are_read(roots, rank_dir, tmp_path):
    sampler = MachineSampler(rank_dir, roots)
    sampler.run()
    for number in range(1, 1200):
        events = f"max 0\noom_kill {int(number > 300)}\n"
        write(
            tmp_path / "host/sys/fs/cgroup/job.slice", {"cpu.stat": cpu_stat(100 + number, 0), "memory.events": events}
        )
        sampler.run()
    sampler.end()
    whole, latest = logged(rank_dir), read_machine_log(rank_dir, [], latest_only=True)
    assert len(latest.readings) < len(whole.readings) / 1.5
    assert latest.sources == whole.sources
    assert [one.value for one in latest.readings if one.name == "oom_kills" and "cgroup" in one.source] == [0, 1]
    assert latest.readings[-1] == whole.readings[-1]
