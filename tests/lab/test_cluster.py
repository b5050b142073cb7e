"""How the commands of a job on several hosts end together, and what each is told of its place."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from overlapscope.diagnosis.process_state import has_process_ended
from overlapscope.lab import cluster
from overlapscope.lab.cluster import ClusterJob, make_launcher_variables
from overlapscope.lab.network.hosts import Hosts

FOREVER = "echo; while :; do sleep 0.05; done"
STUBBORN = f"trap '' INT TERM; {FOREVER}"

Shells = Callable[..., ClusterJob]


def exists(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return not has_process_ended(fields)


@dataclass(frozen=True)
class HostsOfPids(Hosts):
    """Hosts on each of which one known process runs."""

    pids: tuple[int, ...] = ()

    def processes(self, host: int) -> list[int]:
        return [self.pids[host]] if exists(self.pids[host]) else []


@pytest.fixture
def shells() -> Iterator[Shells]:
    """Starts a job of shell scripts, one for each host, and ends what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def start(*scripts: str) -> ClusterJob:
        # Those that stay say when they have begun: before that they would not be deaf to signals.
        for script in scripts:
            process = subprocess.Popen(
                ["sh", "-c", script],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.append(process)
            assert process.stdout is not None
            process.stdout.readline()
        names = tuple(str(number) for number in range(len(scripts)))
        return ClusterJob(HostsOfPids(names, pids=tuple(process.pid for process in started)), started)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "GRACE_PERIOD_S", 0.3)


def test_a_job_whose_commands_all_succeed_has_succeeded(shells):
    failures: list[tuple[int, int]] = []
    assert shells("exit 0", "sleep 0.2").wait([], lambda *failure: failures.append(failure)) == 0
    assert failures == []


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("others", [FOREVER, STUBBORN])
def test_the_first_failure_is_the_job_s_and_the_others_are_ended(shells, others):
    failures: list[tuple[int, int]] = []
    job = shells(others, "exit 7", others)
    assert job.wait([], lambda *failure: failures.append(failure)) == 7
    assert failures == [(1, 7)]
    assert job.processes[0].returncode == (-signal.SIGKILL if others == STUBBORN else -signal.SIGTERM)


def test_others_that_end_by_themselves_are_left_to_do_so(shells, tmp_path):
    os.mkfifo(tmp_path / "failed")
    job = shells(f"echo; read line < {tmp_path}/failed; exit 5", "exit 7")
    assert job.wait([], lambda *_: (tmp_path / "failed").write_text("now\n")) == 7
    assert job.processes[0].returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_all_commands_and_is_how_the_job_ended(shells, number):
    failures: list[tuple[int, int]] = []
    job = shells(FOREVER, f"trap 'exit 3' {number}; {FOREVER}")
    signals: list[int] = []
    threading.Timer(0.2, signals.append, [number]).start()
    assert job.wait(signals, lambda *failure: failures.append(failure)) == -number
    assert [process.returncode for process in job.processes] == [-number, 3]
    assert failures == [], "they were told to"


def test_a_second_signal_ends_at_once_what_the_first_does_not(shells, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_PERIOD_S", 3600.0)
    job = shells(STUBBORN, STUBBORN)
    signals: list[int] = []
    for delay_s in (0.1, 0.4):
        threading.Timer(delay_s, signals.append, [signal.SIGINT]).start()
    assert job.wait(signals, lambda *_: None) == -signal.SIGINT
    assert [process.returncode for process in job.processes] == [-signal.SIGKILL] * 2


@pytest.mark.usefixtures("_impatient")
def test_what_does_not_react_to_a_signal_is_ended_after_a_while(shells):
    assert shells(STUBBORN).wait([signal.SIGTERM], lambda *_: None) == -signal.SIGTERM


def test_all_hosts_are_told_the_same_but_for_their_number():
    hosts = Hosts(("a", "b", "c"))
    of_each = [make_launcher_variables(host, hosts, ranks_per_host=2) for host in range(3)]
    numbers = [each.pop("PET_NODE_RANK") for each in of_each]
    assert numbers == ["0", "1", "2"]
    assert of_each[0] == of_each[1] == of_each[2]
    assert of_each[0]["PET_NNODES"] == "3"
    assert of_each[0]["PET_NPROC_PER_NODE"] == "2"
    assert of_each[0]["PET_MASTER_ADDR"] == of_each[0]["MASTER_ADDR"] == hosts.address(0)


def test_a_host_with_one_rank_is_that_rank_without_a_launcher():
    hosts = Hosts(("a", "b"))
    for host in range(2):
        variables = make_launcher_variables(host, hosts, ranks_per_host=1)
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == (str(host), "2", "0")
    assert "RANK" not in make_launcher_variables(0, hosts, ranks_per_host=2), "only a launcher knows"


def test_torchrun_reads_what_it_is_told(monkeypatch):
    run = pytest.importorskip("torch.distributed.run")
    for name, value in make_launcher_variables(1, Hosts(("a", "b", "c")), ranks_per_host=4).items():
        monkeypatch.setenv(name, value)
    args = run.parse_args(["train.py"])
    assert (args.nnodes, int(args.node_rank), args.nproc_per_node) == ("3", 1, "4")
    assert (args.master_addr, int(args.master_port)) == ("10.0.0.1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
