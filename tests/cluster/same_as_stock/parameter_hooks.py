"""A user's hooks on parameters and modules: what they see, and when, as against the reducer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import make_mlp, mean_square, train

scenarios = Scenarios()
BOTH = (False, True)


def with_hooks(
    make_ddp: MakeDdp, register: Callable[[nn.Module], object], *, after_construction: bool, view: bool
) -> nn.parallel.DistributedDataParallel:
    """A wrapper whose module gets hooks before or after it is wrapped."""
    module = make_mlp()
    if not after_construction:
        register(module)
    model = make_ddp(module, gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    if after_construction:
        register(module)
    return model


@scenarios.add(after_construction=BOTH, view=BOTH)
def a_hook_changes_the_gradient_before_it_is_accumulated(
    make_ddp: MakeDdp, seen: Seen, after_construction: bool, view: bool
) -> None:
    def register(module: nn.Module) -> None:
        for place, parameter in enumerate(module.parameters()):
            parameter.register_hook(lambda gradient, place=place: gradient * (place + 2))

    train(with_hooks(make_ddp, register, after_construction=after_construction, view=view), seen)


@scenarios.add(after_construction=BOTH, view=BOTH)
def a_hook_changes_the_gradient_after_it_is_accumulated(
    make_ddp: MakeDdp, seen: Seen, after_construction: bool, view: bool
) -> None:
    def hook(parameter: torch.Tensor) -> None:
        seen.note("gradient in the hook", parameter.grad)
        parameter.grad.mul_(3)

    def register(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    train(with_hooks(make_ddp, register, after_construction=after_construction, view=view), seen)


@scenarios.add(after_construction=BOTH, view=BOTH)
def a_hook_replaces_the_gradient(make_ddp: MakeDdp, seen: Seen, after_construction: bool, view: bool) -> None:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = torch.full_like(parameter, 2.0)

    def register(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    train(with_hooks(make_ddp, register, after_construction=after_construction, view=view), seen)


@scenarios.add(view=BOTH)
def a_hook_takes_the_gradient_away(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = None

    def register(module: nn.Module) -> None:
        module[2].weight.register_post_accumulate_grad_hook(hook)

    model = with_hooks(make_ddp, register, after_construction=True, view=view)
    for step in range(3):
        mean_square(model, step).backward()
        seen.gradients(f"step {step}", model)


@scenarios.add(after_construction=BOTH)
def a_hook_on_the_node_that_accumulates(make_ddp: MakeDdp, seen: Seen, after_construction: bool) -> None:
    kept = []

    def register(module: nn.Module) -> None:
        for parameter in module.parameters():
            accumulate = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            kept.append(accumulate)  # or else it and its hook are gone
            accumulate.register_prehook(lambda gradients: (gradients[0] + 1,))
            accumulate.register_hook(lambda *_, p=parameter: seen.note("gradient in the hook", p.grad))

    train(with_hooks(make_ddp, register, after_construction=after_construction, view=False), seen)


@scenarios.add()
def a_hook_on_several_gradients(make_ddp: MakeDdp, seen: Seen) -> None:
    def register(module: nn.Module) -> None:
        torch.autograd.graph.register_multi_grad_hook(
            list(module.parameters()), lambda gradients: seen.note("gradients in the hook", list(gradients))
        )

    train(with_hooks(make_ddp, register, after_construction=True, view=False), seen)


@scenarios.add(on_wrapper=BOTH)
def hooks_on_modules(make_ddp: MakeDdp, seen: Seen, on_wrapper: bool) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    target = model if on_wrapper else model.module[2]
    target.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    target.register_forward_hook(lambda *call: call[-1] + 1)
    target.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
    target.register_full_backward_hook(lambda *call: seen.note("gradients in the hook", call[-1]))
    train(model, seen)


@scenarios.add(view=BOTH)
def an_optimizer_steps_in_a_hook(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    # Before the all-reduce: each rank goes its own way, as it does with stock's class.
    def register(module: nn.Module) -> None:
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    model = with_hooks(make_ddp, register, after_construction=True, view=view)
    for step in range(3):
        model.zero_grad()
        mean_square(model, step).backward()
    seen.state("in the end", model)
