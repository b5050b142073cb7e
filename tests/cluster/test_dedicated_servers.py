"""Ranks that only serve: workers come to what stock's DDP comes to without them, and nobody waits for the dead."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.strategies.parameter_server import DedicatedServers
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import read_trace
from tests.cluster.collective_logs import logged
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Weights = list[npt.NDArray[np.float64]]


def trained(model: nn.Module) -> Weights:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        model(torch.randn(8, 17, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().double().numpy().copy() for parameter in model.parameters()]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 33), nn.Linear(33, 65), nn.BatchNorm1d(65), nn.Linear(65, 1))


def train_with_stock() -> Weights:
    return trained(nn.parallel.DistributedDataParallel(net()))


def train_with_servers(servers: int, folder: str | None = None) -> Weights | None:
    job = DedicatedServers(servers)
    if job.serves:
        job.serve()
        return None
    arguments = {"process_group": job.workers, "strategy": job.strategy, "bucket_cap_mb": 0.005, "trace": folder}
    weights = trained(DistributedDataParallel(net(), **arguments))
    job.end()
    return weights


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_workers_come_to_what_stocks_ddp_comes_to_without_servers(workers: int, servers: int) -> None:
    expected, *_ = run_ranks(train_with_stock, workers)
    *results, _ = run_ranks(train_with_servers, workers + servers, servers)
    for weights in results[:workers]:
        for ours, theirs in zip(weights, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert results[workers:] == [None] * (servers - 1)


def test_a_worker_sends_each_bucket_once_and_says_how_large_the_parts_are(tmp_path: Path) -> None:
    run_ranks(train_with_servers, 3, 1, str(tmp_path))
    buckets = read_trace(tmp_path).collectives.query("rank == 0 and op == 'all_reduce'")["bytes"]
    for rank in (0, 1):
        sent = [what for what, _ in logged(tmp_path, rank) if what.op == "send"]
        assert {(what.role, what.peer) for what in sent} == {("segment", 2)}
        assert sum(what.bytes for what in sent if what.dtype == "float32") == buckets.sum()
        assert [what.bytes for what in sent if what.dtype == "int64"] == [16] * (len(buckets) + 1)


def lose(whom: int, timeout_s: float) -> str:
    job = DedicatedServers(1, timeout=timedelta(seconds=timeout_s))
    try:
        if dist.get_rank() == whom:
            time.sleep(3 * timeout_s)  # it has not died, which would be seen at once
        elif job.serves:
            job.serve()
        else:
            trained(DistributedDataParallel(net(), process_group=job.workers, strategy=job.strategy))
    except RuntimeError as error:
        return str(error)
    return ""


def test_nobody_waits_for_a_server_or_a_worker_for_longer_than_the_timeout() -> None:
    worker, _ = run_ranks(lose, 2, 1, 3.0)
    assert worker.startswith("a server is gone ")
    assert "(of ranks 1): " in worker
    _, server = run_ranks(lose, 2, 0, 3.0)
    assert server.startswith("a worker is gone ")
    assert "(of ranks 0): " in server


def ask_for_too_many() -> str:
    try:
        DedicatedServers(2)
    except OverlapScopeError as error:
        return str(error)
    return ""


def test_somebody_has_to_work() -> None:
    said = "2 of 2 ranks can't serve: at least one serves, and one works"
    assert run_ranks(ask_for_too_many, 2) == [said, said]


def train_attached(folder: str) -> None:
    attach(folder)
    train_with_servers(1)


def test_a_server_that_is_recorded_too_has_nothing_wrong_with_it(tmp_path: Path) -> None:
    run_ranks(train_attached, 3, str(tmp_path))
    assert [problem.severity for problem in read_trace(tmp_path).problems] == ["note"]
    diagnosis = Diagnosis.of(tmp_path)
    assert diagnosis is not None
    assert diagnosis.verdict.kind == "healthy"
