"""More than one wrapper: one inside another, side by side, one after the other."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.nn import functional

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, batch, make_mlp, mean_square, train

scenarios = Scenarios()
BOTH = (False, True)


@scenarios.add(view=BOTH)
def a_generator_and_a_discriminator(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    generator, discriminator = (make_ddp(make_mlp(), gradient_as_bucket_view=view) for _ in range(2))
    models = {"generator": generator, "discriminator": discriminator}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()}
    for step in range(3):
        faked = generator(batch(step))

        optimizers["discriminator"].zero_grad()
        loss = functional.softplus(-discriminator(batch(step + 10))).mean()
        loss = loss + functional.softplus(discriminator(faked.detach())).mean()
        loss.backward()
        seen.gradients(f"step {step}, discriminator", discriminator)
        optimizers["discriminator"].step()

        optimizers["generator"].zero_grad()
        discriminator.requires_grad_(False)
        functional.softplus(-discriminator.module(faked)).mean().backward()
        discriminator.requires_grad_(True)
        seen.gradients(f"step {step}, generator", generator)
        optimizers["generator"].step()
    for name, model in models.items():
        seen.state(f"in the end, {name}", model)


@scenarios.add()
def one_loss_of_two_models(make_ddp: MakeDdp, seen: Seen) -> None:
    first, second = make_ddp(make_mlp(), bucket_cap_mb=1e-3), make_ddp(make_mlp(3), bucket_cap_mb=1e-3)
    for step in range(3):
        second(first(batch(step))).square().mean().backward()
        seen.gradients(f"step {step}, first", first)
        seen.gradients(f"step {step}, second", second)


class Outer(nn.Module):
    """A layer before a wrapper."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        return self.inner(self.layer(x))


@scenarios.add()
def a_wrapper_inside_a_wrapper(make_ddp: MakeDdp, seen: Seen) -> None:
    inner = make_ddp(make_mlp(2))
    module = Outer(inner)
    ignored = [name for name, _ in module.named_parameters() if name.startswith("inner")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = make_ddp(module)
    train(model, seen)
    seen.note("active", nn.parallel.DistributedDataParallel._get_active_ddp_module())


@scenarios.add()
def a_module_with_a_wrapper_in_it(make_ddp: MakeDdp, seen: Seen) -> None:
    train(Outer(make_ddp(make_mlp(2))), seen)


class SeesWhoIsActive(nn.Module):
    """Tells which wrapper's forward it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.active: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Note it."""
        self.active = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        return self.layer(x)


@scenarios.add()
def the_wrapper_is_known_during_its_forward(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(SeesWhoIsActive())
    mean_square(model, 0).backward()
    seen.note("inside", model.module.active is model)
    seen.note("outside", nn.parallel.DistributedDataParallel._get_active_ddp_module())


@scenarios.add(view=BOTH)
def a_module_is_wrapped_again(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    module = make_mlp()
    for times in range(3):
        model = make_ddp(module, gradient_as_bucket_view=view)
        train(model, seen, steps=range(times, times + 2))
        del model
        gc.collect()
    mean_square(module, 0).backward()
    seen.gradients("of the module alone", module)


@scenarios.add()
def parts_of_a_model_are_wrapped_apart(make_ddp: MakeDdp, seen: Seen) -> None:
    whole = make_mlp()
    model = nn.Sequential(make_ddp(whole[:3]), make_ddp(whole[3:]))
    train(model, seen)


@scenarios.add()
def wrappers_that_share_parameters(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp()
    first, second = make_ddp(module), make_ddp(module)
    mean_square(first, 0)
    loss = mean_square(second, 1)
    seen.error("backward", loss.backward)
    seen.gradients("after backward", module)
