"""Real jobs that hang in the middle of a sum of sends and receives: who is accused, and what is said of the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.strategies.all_reduces import Hierarchical
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from tests.cluster.collective_logs import reports_of
from tests.cluster.ranks import CONTEXT, on_loopback, run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FAULT_AT = 12
LONG_S = 60.0


class Training:
    """A loop of one bucket, into whose sums faults are put."""

    def __init__(self, strategy: str, trace: str) -> None:
        torch.manual_seed(0)
        self.trace = Path(trace)
        self.step = 0
        chosen: str | Strategy = strategy
        if strategy == "hierarchical":  # two ranks a host
            host = str(dist.get_rank() // 2)
            chosen = Strategy(name="hierarchical", all_reduce=Hierarchical(host=lambda: host))
        self.model = DistributedDataParallel(nn.Linear(64, 40), strategy=chosen, trace=trace)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def before_round(self, number: int, act: Callable[[], None]) -> None:
        """Do something in step ``FAULT_AT``, before the round of this number from 1."""
        seen, exchange = 0, Wire.exchange

        def counted(wire: Wire, **messages: Any) -> None:
            nonlocal seen
            if self.step == FAULT_AT:
                seen += 1
                if seen == number:
                    act()
                    time.sleep(0.5)  # until all threads have stopped
            exchange(wire, **messages)

        Wire.exchange = counted  # type: ignore[method-assign]

    def run(self, skips: int | None = None) -> None:
        """Train, without a backward in step ``FAULT_AT`` on one rank."""
        for number in range(FAULT_AT + 12):
            self.step = number
            time.sleep(0.02)
            if (number, dist.get_rank()) == (FAULT_AT, skips):
                continue
            self.model(torch.randn(8, 64)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def freeze(strategy: str, trace: str, victim: int, number: int) -> None:
    """A rank is stopped before a round, and goes on as soon as another has said so."""
    training, rank = Training(strategy, trace), dist.get_rank()
    pids: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def wake() -> None:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline and not reports_of(training.trace, rank):
            time.sleep(0.02)
        os.kill(pids[victim] or 0, signal.SIGCONT)

    if rank == victim:
        training.before_round(number, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    elif rank == (victim + 1) % len(pids):
        threading.Thread(target=wake, daemon=True).start()
    training.run()


FROZEN = [
    pytest.param(
        ("ring", 3, 1, 3),
        {0: ("round 1 of 2", "all-gather", "by ring"), 2: ("round 1 of 2", "all-gather", "by ring")},
        marks=pytest.mark.nightly,
    ),
    (("ring", 4, 2, 2), {3: ("round 2 of 3", "reduce-scatter", "bucket 0 by ring", "step 12")}),
    (("double_tree", 4, 0, 2), {}),
    (("hierarchical", 4, 1, 1), {0: ("bucket 0 by hierarchical", "step 12", "reduce-scatter in the host")}),
    pytest.param(
        ("hierarchical", 4, 1, 2),
        {3: ("bucket 0 by hierarchical", "step 12", "reduce-scatter between hosts")},
        marks=pytest.mark.nightly,
    ),
]
"""Strategy, ranks, victim and the round before which it is stopped; then in what others wait for it, by rank."""


@pytest.mark.parametrize(
    ("how", "waits"), FROZEN, ids=lambda one: "-".join(map(str, one)) if isinstance(one, tuple) else ""
)
def test_a_rank_that_is_frozen_in_a_sum_is_accused_and_the_others_rounds_and_peers_are_named(
    tmp_path: Path, how: tuple[str, int, int, int], waits: dict[int, tuple[str, ...]]
) -> None:
    strategy, ranks, victim, number = how
    run_ranks(freeze, ranks, strategy, str(tmp_path), victim, number)
    said = [reports_of(tmp_path, rank) for rank in range(ranks) if rank != victim]
    assert any(said)
    for report in (report for reports in said for report in reports):
        verdict = report["verdict"]
        assert (verdict["kind"], verdict["blamed"]) == ("stopped", [victim])
        rounds = [text for text in verdict["evidence"] if " waits in " in text]
        assert f"for rank {victim}" in " ".join(rounds)
        assert not any(text.startswith(f"Rank {victim} waits") for text in rounds)
        for rank, where in waits.items():
            of_rank = [text for text in rounds if text.startswith(f"Rank {rank} waits")]
            assert any(all(part in text for part in (*where, f"rank {victim} to")) for text in of_rank), rounds


def skip_a_backward(strategy: str, trace: str, victim: int) -> None:
    Training(strategy, trace).run(skips=victim)


@pytest.mark.parametrize(
    ("strategy", "ranks", "victim"),
    [("ring", 3, 1), ("hierarchical", 4, 3), pytest.param("double_tree", 4, 2, marks=pytest.mark.nightly)],
)
def test_a_rank_that_skips_a_backward_is_accused_by_the_order_of_its_sums(
    tmp_path: Path, strategy: str, ranks: int, victim: int
) -> None:
    # The others wait for its last sum, which is one less, until it has gone.
    run_ranks(skip_a_backward, ranks, strategy, str(tmp_path), victim)
    verdict = judge(read_evidence(tmp_path)[0])
    assert verdict.named == (victim,)
    assert verdict.step == FAULT_AT
    assert f"by {strategy} of bucket 0" in verdict.sentence


def be_killed(rank: int, world_size: int, strategy: str, trace: str, victim: int, number: int) -> None:
    on_loopback(rank)
    dist.init_process_group("gloo", init_method=f"file://{trace}/rendezvous", rank=rank, world_size=world_size)
    training = Training(strategy, f"{trace}/run")
    if rank == victim:
        training.before_round(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    training.run()


@pytest.mark.parametrize(
    ("strategy", "ranks", "victim", "number"),
    [("ring", 3, 1, 3), ("double_tree", 4, 1, 2), pytest.param("hierarchical", 4, 2, 1, marks=pytest.mark.nightly)],
)
def test_a_rank_that_is_killed_in_a_sum_is_accused_by_what_all_have_left(
    tmp_path: Path, strategy: str, ranks: int, victim: int, number: int
) -> None:
    processes = [
        CONTEXT.Process(target=be_killed, args=(rank, ranks, strategy, str(tmp_path), victim, number))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LONG_S)
            assert process.exitcode is not None
    finally:
        for process in processes:
            process.kill()
    verdict = judge(read_evidence(tmp_path / "run")[0])
    assert (verdict.kind, verdict.blamed) == ("killed", (victim,))
    assert any(f"for rank {victim}" in text and "waits in " in text for text in verdict.evidence)
