"""The same training with our wrapper and with stock DDP, step by step."""

from __future__ import annotations

import torch

from tests.cluster.models import loss_of, make_batch

STEPS = 4


def train_both(name: str, dtype: torch.dtype, rank: int, ours: torch.nn.Module, stock: torch.nn.Module) -> list[str]:
    """List where gradients and buffers part."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, stock)]
    differences = []
    for step in range(STEPS):
        for model, optimizer in zip((ours, stock), optimizers, strict=True):
            # Every other step keeps gradients in place, so that autograd adds to what is already there.
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step == 2:
                with model.no_sync():
                    loss_of(model, make_batch(name, dtype, 100, rank)).backward()
            loss_of(model, make_batch(name, dtype, step, rank)).backward()
        for (parameter_name, own), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
            if not torch.equal(own.grad, other.grad):
                differences.append(f"step {step}: gradient of {parameter_name}")
        for optimizer in optimizers:
            optimizer.step()
    for (buffer_name, own), other in zip(ours.named_buffers(), stock.buffers(), strict=True):
        if not torch.equal(own, other):
            differences.append(f"buffer {buffer_name}")
    return differences
