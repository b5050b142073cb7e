"""Ranks that run out of inputs: `join()`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, logged, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios(world_sizes=(2, 3))
BOTH = (False, True)


def uneven_steps() -> range:
    """Rank 0 has the fewest."""
    return range(2 + 2 * dist.get_rank())


@scenarios.add(divide_by_initial_world_size=BOTH, view=BOTH)
def a_rank_joins_early(make_ddp: MakeDdp, seen: Seen, divide_by_initial_world_size: bool, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        train(model, seen, steps=uneven_steps())
    seen.gradients("after join", model)
    seen.state("after join", model)
    train(model, seen)
    seen.note("logged", logged(model))


@scenarios.add()
def a_rank_has_no_input_at_all(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    with model.join():
        train(model, seen, steps=range(3 * dist.get_rank()))
    seen.state("after join", model)


@scenarios.add(divide_by_initial_world_size=BOTH)
def parameters_are_unused(make_ddp: MakeDdp, seen: Seen, divide_by_initial_world_size: bool) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-3)
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        train(model, seen, steps=uneven_steps(), loss_of=running(lambda step: "abd" if step % 2 else "acd"))
    seen.state("after join", model)


@scenarios.add()
def the_graph_is_static(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), static_graph=True, bucket_cap_mb=1e-3)
    with model.join():
        train(model, seen, steps=uneven_steps(), loss_of=running("abd"))
    seen.state("after join", model)


@scenarios.add()
def gradients_are_accumulated(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    with model.join():
        for step in uneven_steps():
            with model.no_sync():
                mean_square(model, step).backward()
            seen.gradients(f"step {step}, inside no_sync", model)
            mean_square(model, step + 10).backward()
            seen.gradients(f"step {step}", model)
            model.zero_grad()
    seen.state("after join", model)


@scenarios.add()
def there_are_buffers(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    with model.join():
        train(model, seen, steps=uneven_steps())
    seen.state("after join", model)


@scenarios.add()
def there_is_a_hook(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with model.join():
        train(model, seen, steps=uneven_steps())
    seen.state("after join", model)


@scenarios.add()
def all_are_told_when_the_first_is_out_of_inputs(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)

    def train_joined() -> None:
        with model.join(throw_on_early_termination=True):
            train(model, seen, steps=uneven_steps())

    seen.error("join", train_joined)
    seen.gradients("after join", model)
    seen.state("after join", model)


@scenarios.add()
def joining_is_switched_off(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    with model.join(enable=False):
        train(model, seen)


@scenarios.add()
def the_optimizer_joins_too(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, seen, steps=uneven_steps(), optimizer=optimizer)
    seen.state("after join", model)


@scenarios.add()
def two_models_join(make_ddp: MakeDdp, seen: Seen) -> None:
    models = [make_ddp(make_mlp(depth), bucket_cap_mb=1e-3) for depth in (2, 3)]
    with Join(models, divide_by_initial_world_size=False):
        for step in uneven_steps():
            for number, model in enumerate(models):
                mean_square(model, step).backward()
                seen.gradients(f"step {step}, model {number}", model)
    for number, model in enumerate(models):
        seen.state(f"after join, model {number}", model)
