"""What users do with gradients: optimizers of many kinds, clipping, scaling, schedules, averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from torch.optim import swa_utils

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, batch, make_mlp, mean_square, train

scenarios = Scenarios()
BOTH = (False, True)


def make_small_buckets(make_ddp: MakeDdp, view: bool = False) -> nn.parallel.DistributedDataParallel:
    return make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)


@scenarios.add(
    optimizer_class=(torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad),
    how=("foreach", "fused"),
    view=BOTH,
)
def an_optimizer(
    make_ddp: MakeDdp, seen: Seen, optimizer_class: Callable[..., torch.optim.Optimizer], how: str, view: bool
) -> None:
    model = make_small_buckets(make_ddp, view)
    train(model, seen, optimizer=optimizer_class(model.parameters(), lr=0.1, **{how: True}))


@scenarios.add()
def an_optimizer_that_runs_backward_several_times(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_small_buckets(make_ddp)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_square(model, 0)
        loss.backward()
        seen.gradients("in the closure", model)
        return loss

    # Its loss is this rank's own and ends its loop, so that ranks run backward equally often only without tolerance.
    optimizer.param_groups[0].update(tolerance_grad=0.0, tolerance_change=0.0)
    optimizer.step(closure)
    seen.state("in the end", model)


@scenarios.add(view=BOTH)
def gradients_are_clipped(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_small_buckets(make_ddp, view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        mean_square(model, step).backward()
        seen.note(f"step {step}: norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        seen.gradients(f"step {step}", model)
        optimizer.step()
    seen.state("in the end", model)


@scenarios.add(dtype=(torch.bfloat16, torch.float16), view=BOTH)
def mixed_precision_with_a_scaler(make_ddp: MakeDdp, seen: Seen, dtype: torch.dtype, view: bool) -> None:
    model = make_small_buckets(make_ddp, view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = mean_square(model, step)
        if step == 3:
            loss = loss * float("inf")  # the scaler skips this step
        scaler.scale(loss).backward()
        seen.gradients(f"step {step}, scaled", model)
        scaler.unscale_(optimizer)
        seen.gradients(f"step {step}", model)
        scaler.step(optimizer)
        scaler.update()
        seen.note(f"step {step}: scale", scaler.get_scale())
    seen.state("in the end", model)


@scenarios.add()
def a_learning_rate_schedule(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_small_buckets(make_ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    for step in range(4):
        train(model, seen, steps=[step], optimizer=optimizer)
        schedule.step()
        seen.note(f"step {step}: rate", schedule.get_last_lr())


@scenarios.add(parameters_as_bucket_view=BOTH, view=BOTH)
def an_optimizer_that_shards_its_state(
    make_ddp: MakeDdp, seen: Seen, parameters_as_bucket_view: bool, view: bool
) -> None:
    model = make_small_buckets(make_ddp, view)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=parameters_as_bucket_view
    )
    train(model, seen, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        seen.note("state", optimizer.state_dict()["state"])


@scenarios.add(view=BOTH)
def an_optimizer_in_backward(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    module = make_mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = make_ddp(module, gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    seen.error("which asks for an accelerator in the end", lambda: mean_square(model, 0).backward())
    seen.gradients("after backward", model)
    seen.state("after backward", model)


@scenarios.add(optimizer_class=(torch.optim.SGD, torch.optim.Adam), of_some_parameters=BOTH)
def an_optimizer_behind_each_bucket(
    make_ddp: MakeDdp, seen: Seen, optimizer_class: type[torch.optim.Optimizer], of_some_parameters: bool
) -> None:
    model = make_small_buckets(make_ddp)
    options: dict[str, Any] = {"optim_params": list(model.parameters())[:3]} if of_some_parameters else {}
    model._register_fused_optim(optimizer_class, 0.1, **options)
    for step in range(4):
        model.zero_grad()
        mean_square(model, step).backward()
        seen.gradients(f"step {step}", model)
        seen.state(f"step {step}", model)


@scenarios.add()
def an_optimizer_that_can_not_be_behind_buckets(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_small_buckets(make_ddp)
    seen.error("registration", lambda: model._register_fused_optim(torch.optim.LBFGS, 0.1))


@scenarios.add()
def parameters_are_averaged_now_and_then(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_small_buckets(make_ddp)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=1)
    )
    with model.no_sync():
        train(model, seen, optimizer=optimizer)


@scenarios.add()
def an_average_of_the_model_over_time(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    seen.note("type", isinstance(average.module, nn.parallel.DistributedDataParallel))
    for step in range(3):
        train(model, seen, steps=[step])
        average.update_parameters(model)
        with torch.no_grad():
            seen.note(f"step {step}: output of the average", average(batch(step)))
    seen.state("in the end", average)
    swa_utils.update_bn([batch(step) for step in range(2)], average)
    seen.state("after the batch norm is updated", average)
