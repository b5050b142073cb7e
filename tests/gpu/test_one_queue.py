"""With one hardware queue, as Megatron wants it, phases are recorded and buckets are not, and nothing hangs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import Ranks
from tests.gpu.device import make_mlp, needs_a_device, on_the_device, results_of, train

pytestmark = needs_a_device

STEPS = 8


def with_one_queue(rank: int) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    on_the_device(rank)


def train_with_one_queue(folder: str) -> list[float]:
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder or None)
    for _ in train(model, STEPS, dist.get_rank()):
        pass
    torch.cuda.synchronize()
    return [parameter.sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_phases_are_recorded_and_training_comes_to_the_same(tmp_path, backend):
    sums = []
    for folder in ("", str(tmp_path)):
        with Ranks(2, with_one_queue, backend) as ranks:
            sums.append(results_of(ranks.call(train_with_one_queue, folder, is_last=True)))
    assert sums[0] == sums[1]
    trace = read_trace(tmp_path)
    assert trace.errors == []
    assert {"forward", "backward", "optimizer"} <= set(trace.phases["phase"])
    assert trace.collectives.query("bucket >= 0")["end_ns"].isna().all()
