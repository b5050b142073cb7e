"""Parameters without a gradient: found, left alone, or named in the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, batch, logged, make_mlp, train

scenarios = Scenarios()
BOTH = (False, True)

NOT_FINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."
NO_GRADIENT_OF_C = ("layers.c.0.weight", "layers.c.0.bias", "layers.c.2.weight", "layers.c.2.bias")


def running(names: str | Callable[[int], str]) -> Callable[[nn.Module, int], torch.Tensor]:
    """A loss of `Branches` that runs the layers named, possibly others at each step."""
    return lambda model, step: model(batch(step), names if isinstance(names, str) else names(step)).square().mean()


@scenarios.add(view=BOTH)
def a_branch_is_used_on_one_rank_only(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    train(model, seen, loss_of=running("abcd" if dist.get_rank() == 0 else "bd"))


@scenarios.add(view=BOTH)
def a_branch_is_used_on_no_rank(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    train(model, seen, loss_of=running("abd"))


@scenarios.add(view=BOTH)
def a_gradient_that_was_there_before_stays_when_no_rank_uses_the_parameter(
    make_ddp: MakeDdp, seen: Seen, view: bool
) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(dist.get_rank() + 1))
    model(batch(0), "abd").sum().backward()
    seen.gradients("after a pass", model)
    model(batch(1), "acd").sum().backward()
    seen.gradients("after a second pass", model)


@scenarios.add(view=BOTH, bucket_cap_mb=(None, 1e-6))
def branches_alternate(make_ddp: MakeDdp, seen: Seen, view: bool, bucket_cap_mb: float | None) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb)
    train(model, seen, steps=range(6), loss_of=running(lambda step: "acd" if (step + dist.get_rank()) % 3 else "bd"))


@scenarios.add(view=BOTH)
def the_first_step_uses_few_parameters(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    # Buckets are rebuilt in the order of the gradients, of which some are missing at first.
    model = make_ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    train(model, seen, loss_of=running(lambda step: "d" if step == 0 else "dcba"))
    seen.note("logged", logged(model))


@scenarios.add(view=BOTH, on_both_ranks=BOTH)
def a_branch_is_used_inside_no_sync_only(make_ddp: MakeDdp, seen: Seen, view: bool, on_both_ranks: bool) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    for step in range(0, 6, 2):
        model.zero_grad()
        with model.no_sync():
            names = "abc" if on_both_ranks or dist.get_rank() == 0 else "b"
            model(batch(step), names).square().mean().backward()
        seen.gradients(f"step {step}, inside no_sync", model)
        model(batch(step + 1), "ab").square().mean().backward()
        seen.gradients(f"step {step}", model)


class ManyOutputs(nn.Module):
    """Returns the outputs of three layers, packed in one way or another."""

    def __init__(self, packed: Callable[..., object]) -> None:
        super().__init__()
        self.used, self.ignored, self.detached = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.packed = packed

    def forward(self, x: torch.Tensor) -> object:
        """Three outputs, the last detached, and something that is no tensor."""
        return self.packed(self.used(x), self.ignored(x), self.detached(x).detach())


@dataclass
class Outputs:
    """What transformer libraries return."""

    used: torch.Tensor
    ignored: torch.Tensor
    detached: torch.Tensor


def as_tuple(*outputs: torch.Tensor) -> object:
    return outputs


def as_list_with_text(*outputs: torch.Tensor) -> object:
    return [outputs[0], {"ignored": outputs[1], "text": "no tensor"}, None, outputs[2]]


def as_dict(*outputs: torch.Tensor) -> object:
    return dict(zip(("used", "ignored", "detached"), outputs, strict=True))


@scenarios.add(view=BOTH, packed=(as_tuple, as_list_with_text, as_dict))
def some_outputs_are_not_in_the_loss(make_ddp: MakeDdp, seen: Seen, view: bool, packed: Callable[..., object]) -> None:
    model = make_ddp(ManyOutputs(packed), find_unused_parameters=True, gradient_as_bucket_view=view)
    seen.note("output", type(model(batch(0))).__name__)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        output = model(batch(step))
        return output["used" if packed is as_dict else 0].square().mean()

    train(model, seen, loss_of=loss_of)


@scenarios.add()
def outputs_in_a_dataclass_must_be_in_the_loss(make_ddp: MakeDdp, seen: Seen) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        outputs = model(batch(step))
        return (outputs.used + outputs.ignored).square().mean()

    model = make_ddp(ManyOutputs(Outputs), find_unused_parameters=True)
    train(model, seen, loss_of=loss_of)
    model(batch(0)).used.sum().backward()
    seen.error("next forward", lambda: model(batch(1)), sentence=NOT_FINISHED, names=["ignored.weight"])


@scenarios.add()
def different_outputs_are_in_the_loss_on_different_ranks(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(ManyOutputs(as_tuple), find_unused_parameters=True)
    train(model, seen, loss_of=lambda model, step: model(batch(step))[dist.get_rank()].square().mean())


@scenarios.add(view=BOTH)
def unused_parameters_are_not_reduced_if_so_told(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(
        Branches(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        gradient_as_bucket_view=view,
        bucket_cap_mb=1e-4,
    )
    train(model, seen, loss_of=running("ad"))


@scenarios.add()
def finding_none_unused_is_a_warning(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), find_unused_parameters=True)
    with seen.said("warned", "but did not find any unused parameters in the forward pass"):
        train(model, seen)


@scenarios.add()
def an_unused_parameter_is_named_at_the_next_forward(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches())
    model(batch(0), "abd").sum().backward()
    seen.gradients("after the backward that is not finished", model)
    seen.error("next forward", lambda: model(batch(1), "abcd"), sentence=NOT_FINISHED, names=NO_GRADIENT_OF_C)
    seen.error("and the next", lambda: model(batch(1), "abcd"), sentence=NOT_FINISHED, names=NO_GRADIENT_OF_C)


@scenarios.add(level=(dist.DebugLevel.INFO, dist.DebugLevel.DETAIL))
def an_unused_parameter_is_named_by_stock_too_when_debugging(
    make_ddp: MakeDdp, seen: Seen, level: dist.DebugLevel
) -> None:
    usual = dist.get_debug_level()
    dist.set_debug_level(level)
    model = make_ddp(Branches())
    train(model, seen, loss_of=running("abcd"))
    model(batch(0), "abd").sum().backward()
    sentence = f"Parameters which did not receive grad for rank {dist.get_rank()}:"
    seen.error("next forward", lambda: model(batch(1), "abcd"), sentence=sentence, names=NO_GRADIENT_OF_C)
    dist.set_debug_level(usual)


@scenarios.add()
def an_unused_parameter_after_steps_that_used_all(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), bucket_cap_mb=1e-4)
    train(model, seen, loss_of=running("abcd"))
    model(batch(0), "abd").sum().backward()
    seen.error("next forward", lambda: model(batch(1), "abcd"), sentence=NOT_FINISHED, names=NO_GRADIENT_OF_C)


@scenarios.add()
def a_forward_under_no_grad_does_not_mind_an_unused_parameter(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches())
    model(batch(0), "abd").sum().backward()
    with torch.no_grad():
        seen.note("evaluation", model(batch(1), "abcd"))
    seen.error("next forward", lambda: model(batch(1), "abcd"), sentence=NOT_FINISHED, names=NO_GRADIENT_OF_C)


@scenarios.add()
def a_loss_without_any_parameter(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True)
    inputs = batch(0).requires_grad_()
    model(inputs, "").sum().backward()
    seen.note("gradient of the input", inputs.grad)
    train(model, seen, loss_of=running("abcd"))
