"""``overlapscope lab cluster``, as people use it: real hosts, real trainings, and nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlapscope.diagnosis.process_state import has_process_ended
from overlapscope.trace.recording import read_trace
from tests.cli.command_line import COMMAND, REPOSITORY, overlapscope_process
from tests.cluster.hosts import why_unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SENT_BYTES = 4 * 1024**2
TRAINING = f"""
import json, os, pathlib, socket, sys
import torch
import torch.distributed as dist

def sent_bytes(interface):
    return int(pathlib.Path("/sys/class/net", interface, "statistics/tx_bytes").read_text())

dist.init_process_group("gloo")
rank = dist.get_rank()
before = sent_bytes("eth0")
numbers = torch.full(({SENT_BYTES} // 4,), rank + 1.0)
dist.all_reduce(numbers)
dist.barrier()
seen = dict(
    sum=numbers[0].item(),
    host=socket.gethostname(),
    address=socket.gethostbyname(socket.gethostname()),
    local_rank=os.environ["LOCAL_RANK"],
    sent_bytes=sent_bytes("eth0") - before,
)
pathlib.Path(sys.argv[1], f"{{rank}}.json").write_text(json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces_can_be_made() -> None:
    if lacking := why_unavailable():
        pytest.skip(lacking)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A namespace is named after the process that made it, and others may have some of their own."""
    before = namespaces()
    yield
    mine = {name for name in namespaces() - before if not Path("/proc", name.split("-")[1]).exists()}
    assert mine == set()


def namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("overlapscope-*")}


def exists(pid: str) -> bool:
    """Whether a process still does something: what is dead may wait for its parent to notice."""
    try:
        return not has_process_ended(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split())
    except FileNotFoundError:
        return False


def needs_tun() -> None:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/net/tun to be used")


def seen_by_ranks(folder: Path, world_size: int) -> list[dict[str, object]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def test_torchrun_trains_across_the_hosts_and_the_recording_knows_them(tmp_path):
    needs_tun()
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    link = ("--rate", "400mbit", "--latency", "2ms")
    ran = overlapscope_process("lab", "cluster", *link, "-o", tmp_path / "traces", "--", "torchrun", script, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "at 400 Mbit/s and 2.00 ms" in ran.stderr
    for rank, seen in enumerate(seen_by_ranks(tmp_path, 2)):
        assert (seen["host"], seen["address"], seen["local_rank"]) == (f"host{rank}", f"10.0.0.{rank + 1}", "0")
        assert seen["sum"] == 1 + 2
        assert seen["sent_bytes"] >= SENT_BYTES, "half in each phase of a ring of two"
    trace = read_trace(tmp_path / "traces")
    assert dict(zip(trace.ranks["rank"], trace.ranks["host"], strict=True)) == {0: "host0", 1: "host1"}
    assert "recorded 2 ranks" in ran.stderr


@pytest.mark.nightly
def test_hosts_may_have_several_ranks_each(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    ran = overlapscope_process("lab", "cluster", "--ranks-per-host", 2, "--", "torchrun", script, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    seen = seen_by_ranks(tmp_path, 4)
    assert [(each["host"], each["local_rank"]) for each in seen] == [
        ("host0", "0"),
        ("host0", "1"),
        ("host1", "0"),
        ("host1", "1"),
    ]
    assert {each["sum"] for each in seen} == {1 + 2 + 3 + 4}


def test_hosts_know_each_other_by_name_and_lines_say_where_they_come_from():
    script = 'echo "$RANK of $WORLD_SIZE"; getent hosts host0 host1 host2 | tr -s " \\n" " "; echo'
    ran = overlapscope_process("lab", "cluster", "--hosts", 3, "--", "sh", "-c", script)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for host in range(3):
        lines = [line for line in ran.stdout.splitlines() if line.startswith(f"[host {host}] ")]
        assert lines[0] == f"[host {host}] {host} of 3"
        assert all(f"host{other}" in lines[1] for other in range(3))


def test_the_first_failure_is_the_exit_code_and_what_was_left_behind_is_ended(tmp_path):
    script = f'if [ "$RANK" = 1 ]; then setsid sleep 1000 & echo $! > {tmp_path}/pid; exit 9; fi'
    ran = overlapscope_process("lab", "cluster", "--", "sh", "-c", script)
    assert ran.returncode == 9
    assert "host 1 failed first" in ran.stderr
    assert not exists((tmp_path / "pid").read_text().strip())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_hosts_and_removes_them(tmp_path, number):
    script = f"echo $$ > {tmp_path}/$RANK; echo ready; while :; do sleep 0.1; done"
    running = subprocess.Popen(
        [*COMMAND, "lab", "cluster", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    assert running.stdout is not None
    assert {running.stdout.readline() for _ in range(2)} == {"[host 0] ready\n", "[host 1] ready\n"}
    os.killpg(running.pid, number)  # as a terminal does
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number, errors
    for rank in range(2):
        assert not exists((tmp_path / str(rank)).read_text().strip())


def test_a_signal_while_hosts_are_made_leaves_nothing():
    running = subprocess.Popen(
        [*COMMAND, "lab", "cluster", "--hosts", "8", "--", "sh", "-c", "echo it ran"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    while running.poll() is None and not any(name.split("-")[1] == str(running.pid) for name in namespaces()):
        pass
    os.killpg(running.pid, signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT, errors
    assert output == "", "no command is started any more"
