"""Training loops in which replicas stay the same, whatever else differs, and loops in which they don't."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from instrumented_ddp.replicas import schedule

STEPS = 16
FAULT_STEP = 9
FAULTY_RANK = 1

Kind = type[TorchDDP]


@contextmanager
def at_any_cost() -> Iterator[None]:
    """Take all fingerprints at every step."""
    share, schedule.MAX_COST_SHARE = schedule.MAX_COST_SHARE, 1e9  # type: ignore[misc]
    try:
        yield
    finally:
        schedule.MAX_COST_SHARE = share  # type: ignore[misc]


class Net(nn.Module):
    """With everything that may differ between ranks although its parameters must not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 12), nn.BatchNorm1d(12)
        self.branch, self.last = nn.Linear(12, 12), nn.Linear(12, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor, *, without_branch: bool = False) -> torch.Tensor:
        """Map rows of 8 to rows of 3."""
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1)
        return self.last(hidden if without_branch else self.branch(hidden))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net()
    torch.manual_seed(100 + dist.get_rank())
    return made


def loss(model: nn.Module, **how: Any) -> torch.Tensor:
    return model(torch.randn(4, 8), **how).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> None:
    optimizer.zero_grad()
    loss(model, **how).backward()
    optimizer.step()


def with_own_buffers(kind: Kind) -> None:
    model = kind(net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        step(model, optimizer)


def evaluated_with_averaged_weights(kind: Kind) -> None:
    module = net()
    model = kind(module)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(STEPS):
        step(model, optimizer)
        average.update_parameters(module)
        if dist.get_rank() == 0 and number % 5 == 4:
            kept = copy.deepcopy(module.state_dict())
            module.load_state_dict(average.module.state_dict())
            with torch.no_grad():
                module(torch.randn(4, 8))
            module.load_state_dict(kept)
    if dist.get_rank() == 0:  # the best weights, to end with
        module.load_state_dict(average.module.state_dict())


def with_gradient_scaler(kind: Kind) -> None:
    model = kind(net())
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=16.0)
    for number in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model) * (float("inf") if number == 5 and dist.get_rank() == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def with_sharded_optimizer(kind: Kind) -> None:
    model = kind(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(STEPS):
        step(model, optimizer)
        scheduler.step()


def with_closure(kind: Kind) -> None:
    model = kind(net())
    optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.01, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = model.module.last.weight.square().sum() * 0 + loss(model)
        value.backward()
        dist.all_reduce(reported := value.detach().clone())
        return reported

    for _ in range(5):
        optimizer.step(closure)


def accumulated(kind: Kind) -> None:
    model = kind(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        is_last = number % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            loss(model).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def two_models_in_turn(kind: Kind) -> None:
    models = [kind(net(seed)) for seed in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in models]
    for _ in range(STEPS):
        for this, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for parameter in models[1 - this].module.last.parameters():
                parameter.requires_grad_(False)
            step(model, optimizer)
            for parameter in models[1 - this].module.last.parameters():
                parameter.requires_grad_(True)


def joined(kind: Kind, momentum: float = 0.0) -> None:
    model = kind(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum)
    for _ in range(5):
        step(model, optimizer)
    for _ in range(2):
        with model.join():
            for _ in range(5 + 3 * dist.get_rank()):
                step(model, optimizer)
        for _ in range(3):
            step(model, optimizer)


def resumed_on_all_ranks(kind: Kind) -> None:
    model = kind(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        step(model, optimizer)
        if number == 7:
            model.module.load_state_dict(net(7).state_dict())


def looked_at_by_one_rank(kind: Kind) -> None:
    """Between a backward and its update, and between the update and the next forward."""
    model = kind(net(), broadcast_buffers=False)  # which would be a collective in each forward
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        if dist.get_rank() == 0 and number % 3 == 1:
            model(torch.randn(4, 8))
        optimizer.step()
        if dist.get_rank() == 0 and number % 4 == 1:
            with torch.no_grad():
                model(torch.randn(4, 8))


def with_unused_parameters(kind: Kind) -> None:
    model = kind(net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        step(model, optimizer, without_branch=(number + dist.get_rank()) % 3 == 0)


def with_static_graph(kind: Kind) -> None:
    model = kind(net(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        step(model, optimizer)


def wrapped_again(kind: Kind) -> None:
    module = net()
    for _ in range(2):
        model = kind(module)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            step(model, optimizer)
        del model


def averaged_now_and_then(kind: Kind) -> None:
    model = kind(net())
    alone = dist.new_subgroups(1)[0]
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=4), post_localSGD_hook.post_localSGD_hook
    )
    averager = PeriodicModelAverager(period=4, warmup_steps=4)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), averager
    )
    for _ in range(STEPS):
        step(model, optimizer)


def ignoring_a_parameter(kind: Kind) -> None:
    module = net()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["frozen"])
    module.frozen.data.fill_(dist.get_rank())
    model = kind(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        step(model, optimizer)


def compiled(kind: Kind) -> None:
    model = torch.compile(kind(net()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        step(model, optimizer)


HEALTHY: tuple[Callable[[Kind], None], ...] = (
    with_own_buffers,
    evaluated_with_averaged_weights,
    with_gradient_scaler,
    with_sharded_optimizer,
    with_closure,
    accumulated,
    two_models_in_turn,
    resumed_on_all_ranks,
    looked_at_by_one_rank,
    with_unused_parameters,
    with_static_graph,
    wrapped_again,
    averaged_now_and_then,
    ignoring_a_parameter,
    compiled,
)


# -- faults ------------------------------------------------------------------------------------------------------------


def faulty(
    kind: Kind, fault: Callable[[nn.Module, torch.optim.Optimizer], None], at: int, *, is_uneven: bool = False
) -> None:
    """One rank does something before the update of a step; before the first forward if that is -1."""
    model = kind(net())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    with model.join(enable=is_uneven):
        for number in range(-1, STEPS + dist.get_rank() * is_uneven):
            if number >= 0:
                optimizer.zero_grad()
                loss(model).backward()
            if number == at and dist.get_rank() == FAULTY_RANK:
                fault(model.module, optimizer)
            if number >= 0:
                optimizer.step()


def other_weights(module: nn.Module, _: torch.optim.Optimizer) -> None:
    module.load_state_dict(net(3).state_dict())


def other_rate(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def other_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def flipped_bit(module: nn.Module, _: torch.optim.Optimizer) -> None:
    module.branch.weight.data.view(torch.int32)[3, 4] ^= 1  # type: ignore[union-attr, operator]


def flipped_bit_of_frozen(module: nn.Module, _: torch.optim.Optimizer) -> None:
    module.frozen.data.view(torch.int32)[1] ^= 1 << 20  # type: ignore[union-attr, operator]


def healthy(kinds: tuple[Kind, ...]) -> None:
    """All healthy loops, one after the other."""
    with at_any_cost():
        for train in HEALTHY:
            for kind in kinds:
                train(kind)
        for kind in kinds:
            joined(kind)  # after which ranks count other steps


def one_fault(kind: Kind, name: str) -> None:
    """One of the faults."""
    faults: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], None], int]] = {
        "other weights": (other_weights, -1),
        "other rate": (other_rate, FAULT_STEP),
        "other rate under join": (other_rate, FAULT_STEP),
        "other state": (other_state, FAULT_STEP),
        "flipped bit": (flipped_bit, FAULT_STEP),
        "frozen": (flipped_bit_of_frozen, FAULT_STEP),
    }
    with at_any_cost(), suppress(KeyboardInterrupt):
        faulty(kind, *faults[name], is_uneven=name.endswith("under join"))
