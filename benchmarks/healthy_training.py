"""A long training in which nothing is wrong, but much happens: one rank of it, started as by torchrun.

Four models train after each other: with random pauses, with accumulated gradients, with parameters that a rank does
not use, and with uneven inputs under ``join()``. ``benchmarks/fault_table.py`` starts it, and says by
``OVERLAPSCOPE_LAB_STEPS`` how many steps they are to take together.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "faults"))
import job

PAUSES_PER_SECOND = 200
"""Pauses are exponential, 5 ms in the mean."""


class Branches(nn.Module):
    """Two branches, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(job.FEATURES, 64)
        self.branches = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.head = nn.Linear(64, job.CLASSES)

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        """Map (batch, features) to (batch, classes)."""
        x = torch.relu(self.stem(x))
        for index in used:
            x = x + torch.relu(self.branches[index](x))
        return self.head(x)


def train(model: nn.Module, steps: int, luck: random.Random, loss_of: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches(steps):
        time.sleep(luck.expovariate(PAUSES_PER_SECOND))
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        optimizer.step()


def plain_loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs), labels)


def train_accumulating(model: job.DistributedDataParallel, steps: int, luck: random.Random) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (inputs, labels) in enumerate(job.batches(4 * steps)):
        time.sleep(luck.expovariate(4 * PAUSES_PER_SECOND))
        is_last = number % 4 == 3
        with nullcontext() if is_last else model.no_sync():
            plain_loss(model, inputs, labels).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    rank = job.start()
    steps = int(os.environ.get("OVERLAPSCOPE_LAB_STEPS", "1000")) // 4
    luck = random.Random(rank)

    def loss_without_a_branch(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs, (luck.randrange(2),)), labels)

    def new_model(**arguments: bool) -> job.DistributedDataParallel:
        return job.DistributedDataParallel(Branches(), bucket_cap_mb=0.01, **arguments)

    train(new_model(), steps, luck, plain_loss)
    report(rank, "random pauses")
    train_accumulating(new_model(), steps, luck)
    report(rank, "accumulated gradients")
    train(new_model(find_unused_parameters=True), steps, luck, loss_without_a_branch)
    report(rank, "unused parameters")
    model = new_model()
    with model.join():
        train(model, steps - 10 * rank, luck, plain_loss)
    report(rank, "uneven inputs")


def report(rank: int, what: str) -> None:
    if rank == 0:
        print(f"done: {what}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
