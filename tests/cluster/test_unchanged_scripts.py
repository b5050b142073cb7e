"""``overlapscope record`` with scripts that know nothing of us, started as people start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope.cli import recording_folder
from overlapscope.diagnosis.from_recording import read_evidence
from tests.cli.command_line import overlapscope_process as overlapscope
from tests.cluster.collective_logs import logged
from tests.cluster.processes import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIME_LIMIT_S = 120
STARTUP = ROOT / "instrumented_ddp" / "startup"

WITH_DDP = """
import sys

import torch
import torch.distributed as dist
from {package} import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    if step == 2 and "fail" in sys.argv and dist.get_rank() == 1:
        raise ValueError("a bad batch")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()  # else torch aborts now and then when the process ends
"""

WITH_SPAWN = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for _ in range(4):
        dist.all_reduce(torch.ones(5))
    if rank == 1 and "fail" in sys.argv:
        raise ValueError("a bad batch")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(train, (sys.argv[2],), nprocs=2)
    else:
        ranks = [mp.get_context("fork").Process(target=train, args=(rank, sys.argv[2])) for rank in range(2)]
        [rank.start() for rank in ranks]
        [rank.join() for rank in ranks]
"""

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def record(folder: Path, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return overlapscope("record", "-o", folder, "--", *command, **ENVIRONMENT, **environment)


def torchrun(script: Path, *arguments: str) -> list[object]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, *rendezvous, script, *arguments]


def script_in(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize("package", ["torch.nn.parallel", pytest.param("instrumented_ddp", marks=pytest.mark.nightly)])
def test_a_script_with_ddp_is_recorded_once_whosever_ddp_it_is(tmp_path: Path, package: str) -> None:
    traces = tmp_path / "traces"
    ran = record(traces, *torchrun(script_in(tmp_path, WITH_DDP.format(package=package))))
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks, 3 steps" in ran.stderr
    for rank in range(2):
        roles = [what.role for what, _ in logged(traces, rank)]
        assert roles.count("bucket") == 3
        assert set(roles) <= {"construction", "plan", "bucket"}
        assert (traces / f"rank_{rank}" / "parameters.jsonl").read_text().count("\n") == 1
        assert json.loads((traces / f"rank_{rank}" / "ended.json").read_text())["how"] == "ended"
    recording_folder.clear(traces)
    assert not any(traces.iterdir())


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_ranks_that_a_script_starts_itself_are_recorded_and_it_is_not(tmp_path: Path, method: str) -> None:
    traces, script = tmp_path / "traces", script_in(tmp_path, WITH_SPAWN)
    ran = record(traces, sys.executable, script, method, tmp_path / "rendezvous")
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks, 4 collectives" in ran.stderr
    assert "overlapscope diagnose" in ran.stderr
    assert {path.name.partition("_")[0] for path in traces.iterdir()} == {"rank", "exits"}
    for rank in range(2):
        assert [(what.op, what.elements) for what, _ in logged(traces, rank)] == [("all_reduce", 5)] * 4
        assert json.loads((traces / f"rank_{rank}" / "ended.json").read_text())["how"] == "ended"


WITH_CAUGHT_ERROR = WITH_DDP.format(package="torch.nn.parallel").replace(
    'raise ValueError("a bad batch")',
    """
        try:
            raise ValueError("a bad batch")
        except ValueError:
            sys.exit(3)""",
)


@pytest.mark.nightly
def test_a_rank_that_catches_its_error_and_exits_is_named_and_the_one_that_torchrun_ended_is_not(
    tmp_path: Path,
) -> None:
    traces = tmp_path / "traces"
    ran = record(traces, *torchrun(script_in(tmp_path, WITH_CAUGHT_ERROR), "fail"))
    assert ran.returncode == 1
    said = ran.stderr.partition("Rank 1 exited with status 3 ")[2]
    assert f" {tmp_path}/train.py:17 " in said
    assert "ValueError: a bad batch" in said
    evidence, _ = read_evidence(traces)
    assert evidence.ranks[0].was_signaled or evidence.ranks[0].failure is not None  # whichever came first
    assert not evidence.ranks[1].was_signaled
    assert (evidence.ranks[1].exit_status, evidence.job_status) == (3, 1)


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.nightly), "fork"])
def test_a_training_that_fails_is_followed_by_the_exception_of_the_rank_that_did(tmp_path: Path, method: str) -> None:
    traces, script = tmp_path / "traces", script_in(tmp_path, WITH_SPAWN)
    ran = record(traces, sys.executable, script, method, tmp_path / "rendezvous", "fail")
    assert ran.returncode == (1 if method == "spawn" else 0)  # the script's own
    assert "Rank 1 failed" in ran.stderr
    assert "ValueError: a bad batch" in ran.stderr.split("Rank 1 failed")[1]
    assert ran.stderr.splitlines()[-2].startswith("overlapscope record: ")
    ended = json.loads((traces / "rank_1" / "ended.json").read_text())
    assert (ended["how"], ended["type"], ended["message"]) == ("exception", "ValueError", "a bad batch")


def python(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (STARTUP, *folders, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )


def test_a_python_that_is_no_rank_loads_nothing_of_ours(tmp_path: Path) -> None:
    code = "import sys, {0}; print([name for name in sys.modules if name.startswith(('overlapscope', 'instrumented'))])"
    for imported in ("json", "torch.distributed"):
        ran = python(code.format(imported), OVERLAPSCOPE_TRACE=str(tmp_path / "traces"))
        assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_a_sitecustomize_of_the_users_is_run_as_if_ours_were_not_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = __file__")
    code = "import sitecustomize, sys; print(sys.mine, sitecustomize.__file__)"
    ran = python(code, tmp_path, OVERLAPSCOPE_TRACE=str(tmp_path / "traces"))
    assert ran.stdout == f"{tmp_path}/sitecustomize.py {tmp_path}/sitecustomize.py\n"


def test_a_recording_that_cannot_be_made_is_one_line_and_the_script_runs(tmp_path: Path) -> None:
    code = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print("trained")
"""
    (tmp_path / "file").write_text("")
    ran = python(code, OVERLAPSCOPE_TRACE=str(tmp_path / "file"))
    assert (ran.returncode, ran.stdout) == (0, "trained\n")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("overlapscope: rank 0: training continues")
    assert f" {tmp_path}/file/rank_0: " in line
