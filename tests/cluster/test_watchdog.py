"""What the watchdogs of real ranks report while a fault happens, and that they report nothing when none does.

The protocol between them is tested without processes, in ``tests/instrumented_ddp/watchdog/test_protocol.py``.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, IncidentError
from instrumented_ddp.session import get_current_session
from instrumented_ddp.watchdog.local_rank import LocalRankMonitor
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.environment import STALL_TIMEOUT_VARIABLE
from overlapscope.trace.schema import rank_folder
from tests.cluster.collective_logs import reports_of
from tests.cluster.ranks import run_ranks
from tests.cluster.said import said

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FAULT_AT = 30
LONG_S = 60.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, *, skips: bool = False) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x if skips else self.branch(x).tanh())


class Training:
    """A loop of 60 steps into which faults are put."""

    def __init__(self, trace: str, **arguments: object) -> None:
        self.rank = dist.get_rank()
        self.trace = Path(trace)
        self.model = DistributedDataParallel(Net(), bucket_cap_mb=0.005, trace=trace, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.norm, self.loss = torch.zeros(3), torch.ones(3)

    def step(self, **arguments: bool) -> None:
        self.model(torch.randn(8, 32), **arguments).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(0.02)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model.eval()(torch.randn(8, 32))
        self.model.train()

    def goes_on_once_reported(self, pid: int) -> None:
        """Wake a rank as soon as this one has said that it is stopped."""

        def wake() -> None:
            deadline = time.monotonic() + LONG_S
            while time.monotonic() < deadline and not reports_of(self.trace, self.rank):
                time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)

        threading.Thread(target=wake, daemon=True).start()


def kinds(trace: Path, rank: int) -> list[str]:
    return [report["verdict"]["kind"] for report in reports_of(trace, rank)]


def train_healthily(trace: str, how: str) -> None:
    training = Training(trace, find_unused_parameters=how == "unused parameters")
    chance = random.Random(training.rank)
    batches = 40 + (3 * training.rank if how == "join" else 0)

    def loop() -> None:
        for number in range(batches):
            if how == "accumulation" and number % 4:
                with training.model.no_sync():
                    training.model(torch.randn(8, 32)).square().mean().backward()
                continue
            time.sleep(chance.uniform(0, 0.05) if how == "jitter" else 0)
            training.step(skips=how == "unused parameters" and chance.random() < 0.5)
            if how == "other names" and training.rank == 0:
                dist.broadcast(training.norm, 0)
            elif how == "other names":
                dist.broadcast(training.loss, 0)

    if how == "join":
        with training.model.join():
            loop()
        batches = 10  # together again, and with different numbers of steps behind them
        loop()
    else:
        loop()


@pytest.mark.parametrize("how", ["jitter", "accumulation", "unused parameters", "join", "other names"])
def test_nothing_is_reported_of_a_healthy_training(tmp_path, how):
    assert run_ranks(train_healthily, 2, str(tmp_path), how) == [None, None]
    assert reports_of(tmp_path, 0) == reports_of(tmp_path, 1) == []


def swap_two_sums(trace: str) -> None:
    training = Training(trace)
    norm, loss = training.norm, training.loss
    for number in range(FAULT_AT + 120):
        if number == FAULT_AT and training.rank == 1:
            dist.all_reduce(loss)
            dist.all_reduce(norm)
        else:
            dist.all_reduce(norm)
            dist.all_reduce(loss)
        training.step()


def test_swapped_sums_are_reported_although_the_training_goes_on(tmp_path):
    run_ranks(swap_two_sums, 3, str(tmp_path))
    for rank in range(3):
        (report,) = reports_of(tmp_path, rank)
        assert report["verdict"]["kind"] == "swapped collectives"
        assert report["verdict"]["step"] == FAULT_AT
        assert report["verdict"]["blamed"] == [1]
        assert "swap_two_sums" in report["message"]


def freeze_one_parameter(trace: str) -> None:
    training = Training(trace)
    for number in range(FAULT_AT + 1):
        if number == FAULT_AT and training.rank == 1:
            training.model.module.head.bias.requires_grad_(False)
        training.step()
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline and not reports_of(Path(trace), training.rank):
        time.sleep(0.05)


def test_a_parameter_that_was_frozen_on_one_rank_is_said_to_be(tmp_path):
    run_ranks(freeze_one_parameter, 2, str(tmp_path))
    (report,) = reports_of(tmp_path, 1)
    later = judge(read_evidence(tmp_path)[0])
    for kind, sentence in ((report["verdict"]["kind"], report["verdict"]["sentence"]), (later.kind, later.sentence)):
        assert kind == "gradients never ready"
        assert "head.bias is frozen" in sentence
        assert "rank 1" in sentence


def skip_one_batch(trace: str) -> None:
    training = Training(trace)
    for number in range(FAULT_AT + 120 - (training.rank == 0)):
        if number == FAULT_AT and training.rank == 1:
            continue
        training.step()


def test_a_skipped_batch_is_reported_at_the_step_where_it_was_skipped(tmp_path):
    run_ranks(skip_one_batch, 2, str(tmp_path))
    assert [(r["verdict"]["kind"], r["verdict"]["step"]) for r in reports_of(tmp_path, 0)] == [
        ("batch skipped", FAULT_AT)
    ]


def sleep(seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        time.sleep(0.5)  # who wakes often on a crowded host queues for a core, and seems busy


def sleep_between_two_steps(trace: str) -> str | None:
    os.environ[STALL_TIMEOUT_VARIABLE] = "4"
    training = Training(trace, on_incident="raise")
    try:
        for number in range(FAULT_AT + 20):
            if number == FAULT_AT and training.rank == 1:
                sleep(LONG_S)
            training.step()
    except IncidentError as error:
        return str(error)
    return None


def test_a_rank_that_sleeps_is_named_and_all_ranks_are_stopped(tmp_path):
    said = run_ranks(sleep_between_two_steps, 2, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith("Rank 1 ")
    assert "(sleep)" in said[0]
    verdict = reports_of(tmp_path, 0)[0]["verdict"]
    assert (verdict["kind"], verdict["step"]) == ("stuck", FAULT_AT)
    assert (rank_folder(tmp_path, 1) / "stacks_1.txt").read_text().count("Thread") > 1


def evaluate_and_pause(trace: str) -> None:
    """Rank 1 has not stood still for as long as the other one has waited for it."""
    training = Training(trace, on_incident="raise")
    for number in range(FAULT_AT + 60):
        if number == FAULT_AT and training.rank == 1:
            time.sleep(1.2)
            training.evaluate()
            sleep(LONG_S, until=lambda: bool(reports_of(training.trace, 0)))
        training.step()


def test_a_job_that_only_pauses_is_suspected_and_not_ended(tmp_path):
    run_ranks(evaluate_and_pause, 2, str(tmp_path))
    (report,) = reports_of(tmp_path, 0)
    assert report["verdict"]["certainty"] == "likely"
    assert report["retracted_ns"] > report["time_ns"]


def evaluate_alone(trace: str, evaluator: int) -> list[str]:
    """As in ``if rank == 0: evaluate()``, with the model in its wrapper, for longer than anybody waits for a hang."""
    os.environ[STALL_TIMEOUT_VARIABLE] = "2"
    training = Training(trace, on_incident="raise")
    with said() as lines:
        for number in range(FAULT_AT + 20):
            if number == FAULT_AT and training.rank == evaluator:
                until = time.monotonic() + 8
                while time.monotonic() < until:
                    training.evaluate()
                    time.sleep(0.1)
            training.step()
    return lines


@pytest.mark.parametrize("evaluator", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_rank_that_evaluates_by_itself_is_slow_and_no_fault(tmp_path, evaluator):
    lines = run_ranks(evaluate_alone, 2, str(tmp_path), evaluator)
    assert [reports_of(tmp_path, rank) for rank in (0, 1)] == [[], []]
    (line,) = chain(*lines)
    assert line.startswith(f"Rank {evaluator} is late")
    assert f"step {FAULT_AT}" in line
    assert f"rank {1 - evaluator} has waited" in line


def launch_after_a_look(trace: str) -> bool:
    training = Training(trace)
    training.step()
    session = get_current_session()
    monitor = LocalRankMonitor(session.collectives, session.models, session.replicas, session.caught)
    monitor.look()
    time.sleep(0.1)
    before_ns = time.monotonic_ns()
    training.step()
    snapshot = monitor.snapshot({}, with_models=False, listening=())
    return snapshot.evidence.idle_ns < time.monotonic_ns() - before_ns


def test_a_rank_that_has_launched_since_its_watchdog_looked_was_not_idle(tmp_path):
    assert run_ranks(launch_after_a_look, 2, str(tmp_path)) == [True, True]


def stop_for_a_while(trace: str) -> None:
    training = Training(trace)
    pids: list[int | None] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    for number in range(FAULT_AT + 60):
        if number == FAULT_AT and training.rank == 0:
            training.goes_on_once_reported(pids[1])
        if number == FAULT_AT and training.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        training.step()


def test_a_stopped_rank_is_named_and_the_report_is_withdrawn_when_it_goes_on(tmp_path):
    run_ranks(stop_for_a_while, 2, str(tmp_path))
    (report,) = reports_of(tmp_path, 0)
    assert report["verdict"]["kind"] == "stopped"
    assert report["verdict"]["blamed"] == [1]
    assert report["retracted_ns"] > report["time_ns"]


def compute_for_long_once(trace: str) -> None:
    training = Training(trace)
    for number in range(FAULT_AT + 20):
        if number == FAULT_AT and training.rank == 1:
            until = time.monotonic() + 8
            while time.monotonic() < until:
                torch.randn(64, 64) @ torch.randn(64, 64)
        training.step()


def test_a_rank_that_computes_is_not_called_stuck(tmp_path):
    run_ranks(compute_for_long_once, 2, str(tmp_path))
    assert reports_of(tmp_path, 0) == reports_of(tmp_path, 1) == []
