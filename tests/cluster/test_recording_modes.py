"""Recording turned off, on and to a sample while real ranks train: all switch at the same step, and lose no bits."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.recording import modes
from instrumented_ddp.session import get_current_session
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.trace.environment import DEFAULT_EVERY, SAMPLE_VARIABLE
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.recording_modes import (
    OFF,
    BegunMode,
    RecordingMode,
    is_full_step,
    read_begun_modes,
    write_control,
)
from overlapscope.trace.schema import CONTROL_FILE, rank_folder
from tests.cli.command_line import COMMAND
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster

STEPS = 24
OFF_STEPS = range(6, 10)
SAMPLED_FROM = 14
SAMPLE = 4
DETAILED_FROM = 20
ASKED = (
    RecordingMode(from_step=OFF_STEPS.start, every=OFF),
    RecordingMode(from_step=OFF_STEPS.stop, every=1),
    RecordingMode(from_step=SAMPLED_FROM, every=SAMPLE),
    RecordingMode(from_step=DETAILED_FROM, every=2, detail="parameters"),
)
_SAMPLED = [step for step in range(SAMPLED_FROM, DETAILED_FROM) if is_full_step(step, SAMPLE)]
_DETAILED = [step for step in range(DETAILED_FROM, STEPS) if is_full_step(step, 2)]
FULL = [*range(OFF_STEPS.start), *range(OFF_STEPS.stop, SAMPLED_FROM), *_SAMPLED, *_DETAILED]
RECORDED = [step for step in range(STEPS) if step not in OFF_STEPS]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def train(model: nn.Module, folder: str = "") -> list[float]:
    """Train, and ask for modes on rank 0 some steps ahead; the loss of each step."""
    modes.LOOK_INTERVAL_NS = 0
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    asked: list[RecordingMode] = []
    for step in range(STEPS):
        for mode in ASKED:
            if folder and dist.get_rank() == 0 and step == mode.from_step - 3:
                write_control(Path(folder), asked, mode)
                asked.append(mode)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(folder: str) -> list[float]:
    return train(DistributedDataParallel(make_net(), bucket_cap_mb=0.0005, trace=folder or None), folder)


def stock(folder: str) -> list[float]:
    if folder:
        attach(folder)
    return train(TorchDDP(make_net(), bucket_cap_mb=0.0005), folder)


def sharded(folder: str) -> list[float]:
    if folder:
        attach(folder)
    net = make_net()
    fully_shard(net)
    return train(net, folder)


def begun(folder: Path, rank: int) -> list[BegunMode]:
    return list(read_begun_modes(rank_folder(folder, rank), []))


def steps_of(trace: Trace, table: str) -> dict[int, list[int]]:
    """The steps that each rank has rows of."""
    rows = getattr(trace, table)
    return {int(rank): sorted(set(own["step"].tolist())) for rank, own in rows.groupby("rank")}


@pytest.mark.parametrize("kind", [ours, stock, sharded])
def test_all_ranks_switch_at_the_steps_that_were_asked_for_and_the_losses_are_the_same(kind, tmp_path: Path) -> None:
    losses = run_ranks(kind, 2, str(tmp_path))
    assert losses == run_ranks(kind, 2, "")
    trace = read_trace(tmp_path)
    assert trace.errors == []
    for table in ("steps", "phases", "collectives"):
        assert steps_of(trace, table) == {0: RECORDED, 1: RECORDED}, table
    for rank in range(2):
        found = [(mode.step, mode.agreed_step, mode.every, mode.detail) for mode in begun(tmp_path, rank)]
        assert found == [(mode.from_step, mode.from_step, mode.every, mode.detail) for mode in ASKED]
    if kind is ours:
        assert steps_of(trace, "copies") == {0: FULL, 1: FULL}
    if kind is not sharded:
        timed = [step for step in FULL if step >= DETAILED_FROM]
        assert steps_of(trace, "gradients") == {0: timed, 1: timed}
        of_last = trace.gradients.query(f"step == {timed[0]}")
        assert sorted(of_last["parameter"]) == sorted(2 * [*range(8)])


def test_the_first_step_after_a_break_begins_where_the_one_before_it_ended(tmp_path: Path) -> None:
    run_ranks(ours, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    first = trace.steps.query(f"step == {OFF_STEPS.stop} and rank == 0").iloc[0]
    inside = trace.phases.query(f"step == {OFF_STEPS.stop} and rank == 0").sort_values("start_ns")
    assert inside["phase"].tolist() == ["loop", "forward", "backward", "finalize", "optimizer"]
    assert inside["start_ns"].iloc[0] == first["start_ns"]
    assert inside["end_ns"].iloc[-1] == first["end_ns"]


def test_a_step_is_marked_as_light_unless_it_is_of_the_sample(tmp_path: Path) -> None:
    run_ranks(ours, 2, str(tmp_path))
    steps = read_trace(tmp_path).steps.query("rank == 1")
    assert steps["step"][~steps["is_light"]].tolist() == FULL
    assert steps["step"].tolist() == RECORDED


def started_off(folder: str) -> tuple[int, int]:
    os.environ[SAMPLE_VARIABLE] = "0"
    ours(folder)
    session = get_current_session()
    assert session is not None
    assert session.recorder is not None
    return session.recorder.steps.step, sum(log.latest for log in session.collectives.logs)


def test_a_rank_that_starts_off_counts_steps_and_logs_collectives_until_it_is_asked_for_more(tmp_path: Path) -> None:
    results = run_ranks(started_off, 2, str(tmp_path))
    assert all(steps >= STEPS - 1 and entries > STEPS for steps, entries in results)
    trace = read_trace(tmp_path)
    after = [*range(OFF_STEPS.stop, STEPS)]
    assert steps_of(trace, "steps") == {0: after, 1: after}
    assert [(mode.step, mode.every) for mode in begun(tmp_path, 0)][:2] == [(0, OFF), (OFF_STEPS.stop, 1)]


def late(folder: str) -> None:
    """Rank 1 does not look until step 7."""
    look = modes.ModeFollower._look

    def look_late(self: modes.ModeFollower) -> None:
        session = get_current_session()
        if session is None or session.recorder is None or dist.get_rank() == 0 or session.recorder.steps.step >= 7:
            look(self)

    modes.ModeFollower._look = look_late  # type: ignore[method-assign]
    ours(folder)


def test_a_rank_that_sees_a_request_late_follows_at_once_and_says_so(tmp_path: Path) -> None:
    run_ranks(late, 2, str(tmp_path))
    assert (begun(tmp_path, 1)[0].step, begun(tmp_path, 1)[0].agreed_step) == (7, 6)
    missing = {rank: set(range(STEPS)) - set(steps) for rank, steps in steps_of(read_trace(tmp_path), "steps").items()}
    assert missing == {0: {6, 7, 8, 9}, 1: {7, 8, 9}}


def killed_while_off(folder: str) -> None:
    os.environ[SAMPLE_VARIABLE] = "0"
    torch.manual_seed(0)
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0005, trace=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 8 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_while_recording_is_off_is_known_by_its_collectives(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    with pytest.raises(RuntimeError, match="rank 1 died"):
        run_ranks(killed_while_off, 2, str(tmp_path))
    evidence, _ = read_evidence(tmp_path)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))
    assert {rank: one.off_since for rank, one in evidence.ranks.items()} == {0: 0, 1: 0}
    position = evidence.ranks[1].position
    assert position is not None
    assert position.step == 8
    report = format_report(verdict, evidence)
    golden("verdict/killed_while_off", next(line for line in report.splitlines() if "Recording was off" in line))


def with_damaged_control(folder: str) -> list[float]:
    (Path(folder) / CONTROL_FILE).write_text("{")
    return train(DistributedDataParallel(make_net(), trace=folder))


def test_a_damaged_request_changes_nothing(tmp_path: Path) -> None:
    run_ranks(with_damaged_control, 2, str(tmp_path))
    assert steps_of(read_trace(tmp_path), "steps") == {0: [*range(STEPS)], 1: [*range(STEPS)]}


def controlled(folder: str) -> list[int]:
    """Train until the command that rank 0 runs beside it has turned recording off, and on again; the steps it named."""
    model = DistributedDataParallel(make_net(), trace=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named: list[int] = []

    def ask() -> None:
        for option in ("--off", "--on"):
            output = subprocess.check_output([*COMMAND, "control", folder, option], text=True)
            named.append(int(output.split()[2].rstrip(":")))
            while model.recorder is None or model.recorder.steps.step < named[-1] + 5:
                time.sleep(0.01)

    asking = threading.Thread(target=ask)
    if dist.get_rank() == 0:
        asking.start()
    is_over = torch.zeros(1)
    while not is_over.item():
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)
        is_over[0] = float(dist.get_rank() == 0 and not asking.is_alive())
        dist.all_reduce(is_over)
    return named


def test_the_command_turns_a_running_job_off_and_on_at_one_step_on_all_ranks(tmp_path: Path) -> None:
    (off, on), _ = run_ranks(controlled, 2, str(tmp_path))
    for rank in range(2):
        found = [(mode.step, mode.agreed_step, mode.every) for mode in begun(tmp_path, rank)]
        assert found == [(off, off, OFF), (on, on, DEFAULT_EVERY)]
    recorded = steps_of(read_trace(tmp_path), "steps")
    assert recorded[0] == recorded[1]
    assert set(range(recorded[0][-1] + 1)) - set(recorded[0]) == set(range(off, on))
