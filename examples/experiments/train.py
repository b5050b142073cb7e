"""One rank of a trial: an ordinary DDP training, recorded as its environment says. ``rank.py`` starts it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from meeting import Task
from workloads import WORKLOADS, compute_loss

from instrumented_ddp import DistributedDataParallel, ShardedOptimizer
from instrumented_ddp.strategies.registry import resolve_strategy
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.lab.experiments.trial import ExperimentTrial


def make_strategy(trial: ExperimentTrial) -> Strategy:
    """Return the strategy of a trial, with as many process groups as it asks for."""
    strategy = resolve_strategy(trial.strategy)
    return strategy if trial.groups is None else replace(strategy, groups=trial.groups)


def make_optimizer(model: DistributedDataParallel, strategy: Strategy, learning_rate: float) -> torch.optim.Optimizer:
    """Make SGD as a strategy needs it: on shards of the parameters, or updating each when the next forward needs it."""
    if strategy.pads_to is not None:
        return ShardedOptimizer(model, torch.optim.SGD, lr=learning_rate, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    if strategy.then is not None or strategy.slice_bytes is not None:
        model.defer(optimizer)
    return optimizer


def train(trial: ExperimentTrial, task: Task, device: torch.device) -> list[torch.Tensor]:
    """Train, and return the loss of each forward pass."""
    torch.manual_seed(trial.seed)
    workload = WORKLOADS[trial.model]()
    settings: dict[str, Any] = {} if trial.bucket_cap_mb is None else {"bucket_cap_mb": trial.bucket_cap_mb}
    if device.type == "cuda":
        settings["device_ids"] = [device.index]
    strategy = make_strategy(trial)
    model = DistributedDataParallel(workload.module.to(device), strategy=strategy, **settings)
    learning_rate = workload.learning_rate if trial.learning_rate is None else trial.learning_rate
    optimizer = make_optimizer(model, strategy, learning_rate)
    generator = torch.Generator().manual_seed(1000 * trial.seed + task.rank)  # every rank draws different samples
    batch = trial.batch or workload.batch
    losses = []
    for _ in range(trial.steps):
        for pass_index in range(trial.sync_every):
            inputs, targets = workload.draw(batch, generator)
            is_last = pass_index == trial.sync_every - 1
            with nullcontext() if is_last else model.no_sync():
                loss = compute_loss(model, (inputs.to(device), targets.to(device)))
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    """Take part in one trial."""
    task = Task.read()
    trial = ExperimentTrial(**task.settings)
    device = task.device()
    task.join()
    losses = torch.stack(train(trial, task, device))
    dist.all_reduce(losses)
    task.finish({"losses": (losses / task.ranks).tolist()})


if __name__ == "__main__":
    main()
