"""What is recorded of loops that reduce gradients by hand, in scripts that know nothing of us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import attach
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import Trace, read_trace
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 8
SIZES = [64 * 32, 64, 64 * 64, 64, 64, 1]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def flat(parameters: list[nn.Parameter]) -> None:
    gradients = torch.cat([one.grad.view(-1) for one in parameters if one.grad is not None])
    dist.all_reduce(gradients)
    for one, mean in zip(parameters, gradients.split(SIZES), strict=True):
        one.grad = mean.view_as(one) / 2


def one_by_one(parameters: list[nn.Parameter]) -> None:
    for one in parameters:
        dist.all_reduce(one.grad)
        one.grad /= 2


def asynchronous(parameters: list[nn.Parameter]) -> None:
    buckets = [parameters[4:], parameters[2:4], parameters[:2]]
    buffers = [torch.cat([one.grad.view(-1) for one in bucket if one.grad is not None]) for bucket in buckets]
    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    for work, buffer, bucket in zip(works, buffers, buckets, strict=True):
        work.wait()
        for one, mean in zip(bucket, buffer.split([one.numel() for one in bucket]), strict=True):
            one.grad = mean.view_as(one) / 2


def to_owners(parameters: list[nn.Parameter]) -> None:
    """Sum each gradient on one rank, as where each rank updates a part of the parameters, and send it to the other."""
    for number, one in enumerate(parameters):
        dist.reduce(one.grad, number % 2)
    for number, one in enumerate(parameters):
        dist.broadcast(one.grad, number % 2)


LOOPS: dict[str, tuple[Callable[[list[nn.Parameter]], None], list[tuple[int, ...]]]] = {
    "flat": (flat, [(0, 1, 2, 3, 4, 5)]),
    "one by one": (one_by_one, [(0,), (1,), (2,), (3,), (4,), (5,)]),
    "asynchronous": (asynchronous, [(4, 5), (2, 3), (0, 1)]),
    "to owners": (to_owners, [(0,), (1,), (2,), (3,), (4,), (5,)]),
}
"""How each loop reduces, and the parameters of its buckets."""


def train(folder: str, names: list[str]) -> list[float]:
    """Train with some loops after each other, and return the sums of what they have learned."""
    if folder:
        attach(folder)
    sums = []
    for name in names:
        torch.manual_seed(0)
        model = net()
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            with torch.no_grad():
                model(torch.randn(2, 32))
            model(torch.randn(4, 32)).square().mean().backward()
            LOOPS[name][0](list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(torch.zeros(1))  # a metric
        sums.append(sum(one.sum().item() for one in model.parameters()))
    return sums


def buckets_of(trace: Trace, model: int) -> list[tuple[int, ...]]:
    plans = trace.plans[trace.plans["model"] == model]
    return [tuple(of_bucket["parameter"]) for _, of_bucket in plans.groupby("bucket")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    folder = tmp_path_factory.mktemp("own loops") / "traces"
    names = [*LOOPS]
    assert run_ranks(train, 2, str(folder), names) == run_ranks(train, 2, "", names), "to the bit"
    return folder, read_trace(folder)


def test_all_updates_but_the_first_are_steps_with_the_loops_own_buckets(recorded: tuple[Path, Trace]) -> None:
    folder, trace = recorded
    assert trace.problems == ()
    assert trace.steps["step"].tolist() == 2 * list(range(1, len(LOOPS) * STEPS))
    for model, (_, buckets) in enumerate(LOOPS.values()):
        assert buckets_of(trace, model) == buckets
        seen = trace.collectives.query("rank == 1 and model == @model and step % @STEPS == 3")
        assert seen["bucket"].tolist() == list(range(len(buckets)))
        assert seen["bytes"].sum() == 4 * sum(SIZES)
        assert seen["end_ns"].notna().all()
    verdict = judge(read_evidence(folder)[0])
    assert (verdict.kind, verdict.sentence.split(":")[0]) == ("healthy", "All ranks finished")


def test_waits_for_them_are_exposed_communication_and_others_are_the_users(recorded: tuple[Path, Trace]) -> None:
    analysis = Analysis(recorded[1])
    figures = analysis.summary.figures.query("step < 2 * @STEPS and step != @STEPS")  # the first of a loop is not known
    blocks = ["forward", "evaluation", "backward", "exposed", "optimizer", "collectives"]
    assert (figures[[f"{block}_ns" for block in blocks]] > 0).all(axis=None)
    with pytest.raises(OverlapScopeError, match="no bucket_cap_mb to choose"):
        advise(analysis)
