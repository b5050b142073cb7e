"""``fully_shard`` and ``replicate`` on a real device, in scripts that know nothing of us."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instrumented_ddp import attach
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.trace.recording import read_trace
from tests.gpu.device import make_mlp, needs_a_device, results_of, run_on_device, train

pytestmark = needs_a_device

STEPS = 8


def train_sharded(folder: str, how: str) -> list[float]:
    if folder:
        attach(folder)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = make_mlp(6)
    if how == "fully_shard":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed._composable.replicate import replicate

        replicate(model, device_mesh=mesh)
    for step in train(model, STEPS, dist.get_rank()):
        if step == 4:
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    return [local(parameter).sum().item() for parameter in model.parameters()]


def local(parameter: nn.Parameter) -> torch.Tensor:
    to_local = getattr(parameter, "to_local", None)
    return to_local() if to_local else parameter


@pytest.mark.parametrize("how", ["fully_shard", "replicate"])
def test_recorded_it_comes_to_the_same_and_never_waits(tmp_path, how):
    plain = results_of(run_on_device(train_sharded, "nccl", 2, "", how))
    recorded = results_of(run_on_device(train_sharded, "nccl", 2, str(tmp_path), how))
    assert recorded == plain
    trace = read_trace(tmp_path)
    assert trace.errors == []
    ops = set(trace.collectives.query("bucket >= 0")["op"])
    assert ops == ({"all_gather", "reduce_scatter"} if how == "fully_shard" else {"all_reduce"})
    breakdown = compute_breakdown(trace)
    assert (breakdown.ns >= 0).all()
    assert (breakdown.ns.sum(axis=1) == breakdown.end_ns - breakdown.start_ns).all()
