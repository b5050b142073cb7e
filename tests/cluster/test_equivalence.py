"""The gradients are those of stock DDP, and those of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel
from tests.cluster.beside_stock import STEPS, train_both
from tests.cluster.models import loss_of, make_batch, make_model
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster

MODELS = ("mlp", "convnet", "transformer")
DTYPES = (torch.float32, torch.bfloat16)


def train_beside_stock(trace: str, bucket_cap_mb: float | None) -> list[str]:
    """Train every model with ours and with stock DDP, and list where they part."""
    rank = dist.get_rank()
    differences = []
    for name in MODELS:
        for dtype in DTYPES:
            for view in (False, True):
                ours = DistributedDataParallel(
                    make_model(name, dtype), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view, trace=trace
                )
                stock = torch.nn.parallel.DistributedDataParallel(
                    make_model(name, dtype), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view
                )
                case = f"{name} {dtype} view={view}"
                differences += [f"{case}: {what}" for what in train_both(name, dtype, rank, ours, stock)]
    return differences


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.005])
def test_gradients_and_buffers_equal_stock_ddp_to_the_bit_while_recording(tmp_path, bucket_cap_mb):
    # With two ranks a sum has one order only, so equality to the bit may be asked for.
    assert run_ranks(train_beside_stock, 2, str(tmp_path / "traces"), bucket_cap_mb) == [[], []]


def train_beside_one_process() -> list[str]:
    """Compare with one process that computes all ranks' losses. Batch norm sees each rank's part, as it does in DDP."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    differences = []
    for name in MODELS:
        for dtype in DTYPES:
            model = make_model(name, dtype)
            if rank != 0:  # other weights, which the constructor must replace by rank 0's
                for parameter in model.parameters():
                    torch.nn.init.zeros_(parameter)
            ours = DistributedDataParallel(model, bucket_cap_mb=0.005)
            single = make_model(name, dtype)
            pairs = list(zip(ours.named_parameters(), single.parameters(), strict=True))
            for step in range(STEPS):
                ours.zero_grad()
                single.zero_grad()
                loss_of(ours, make_batch(name, dtype, step, rank)).backward()
                batches = [make_batch(name, dtype, step, each) for each in range(world_size)]
                if name == "convnet":
                    loss = torch.stack([loss_of(single, batch) for batch in batches]).mean()
                else:
                    inputs, targets = zip(*batches, strict=True)
                    loss = loss_of(single, (torch.cat(inputs), torch.cat(targets)))
                loss.backward()
                tolerance = 1e-5 if dtype is torch.float32 else 2e-2
                for (parameter_name, own), other in pairs:
                    if not torch.allclose(own.grad, other.grad, rtol=tolerance, atol=tolerance):
                        differences.append(f"{name} {dtype} step {step}: {parameter_name}")
                with torch.no_grad():
                    for (_, own), other in pairs:
                        own -= 0.1 * own.grad
                        other.copy_(own)  # rounding must not add up over the steps
    return differences


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_equal_one_process_on_the_whole_batch(world_size):
    assert run_ranks(train_beside_one_process, world_size) == [[]] * world_size
