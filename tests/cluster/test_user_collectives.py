"""Collectives of the user: what ranks wait for in them is a block of the breakdown, and nothing is kept of them."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.analysis import Analysis
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster

needs_torch_28 = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="needs torch 2.8: before, a collective does not tell whether it is waited for"
)

STEPS, LATE_S = 6, 0.05


def train(trace: str) -> None:
    """Rank 1 comes late to an average that rank 0 waits for; another one is waited for much later."""
    gc.disable()  # a collection in a wait is a pause, and no part of the wait
    model = DistributedDataParallel(nn.Linear(8, 2), trace=trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        later = dist.all_reduce(mean, async_op=True)
        loss.backward()
        later.wait()
        optimizer.step()


@needs_torch_28
def test_who_waits_for_a_late_rank_there_does_so_in_a_block_of_its_own(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    assert trace.user_collectives.groupby("rank").size().tolist() == [STEPS, STEPS], "those that are waited for at once"
    waiting, late = (spans.reset_index() for _, spans in trace.user_collectives.groupby("rank"))
    assert (waiting["end_ns"] > late["start_ns"]).all(), "nobody goes on before all are there"
    figures = Analysis(trace).summary.figures
    lengths_ns = trace.user_collectives["end_ns"] - trace.user_collectives["start_ns"]
    assert figures["collectives_ns"].sum() == lengths_ns.sum(), "each is in a step, and nothing interrupts it"


def fail(trace: str) -> str:
    """Rank 1 never comes."""
    DistributedDataParallel(nn.Linear(8, 2), trace=trace)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(3), group=group)
    return str(raised.value)


@needs_torch_28
def test_its_failure_is_told_to_the_line_that_waits(tmp_path: Path) -> None:
    told, _ = run_ranks(fail, 2, str(tmp_path))
    assert "imed out" in told
    assert read_trace(tmp_path).user_collectives["rank"].tolist() == [0], "it waited, though in vain"


def let_go(trace: str) -> list[bool]:
    """Whether a tensor is gone when the last variable that held it is."""
    model = DistributedDataParallel(nn.Linear(8, 2), trace=trace)
    gone = []
    for _ in range(8):
        output = model(torch.randn(4, 8))
        mean = output.detach().mean()
        dist.all_reduce(mean)
        output.square().mean().backward()
        tensors = weakref.ref(output), weakref.ref(mean)
        del output, mean
        gone.append([tensor() for tensor in tensors] == [None, None])
    return gone


def test_what_a_script_lets_go_of_is_gone_although_its_variables_were_looked_at(tmp_path: Path) -> None:
    assert run_ranks(let_go, 1, str(tmp_path)) == [[True] * 8]
