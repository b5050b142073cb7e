"""Activation checkpointing: parameters whose gradients come in a backward inside the backward."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, batch, make_mlp, mean_square, train

scenarios = Scenarios()
BOTH = (False, True)

TWICE = "Expected to mark a variable ready only once."


class Checkpointed(nn.Module):
    """Three layers, of which some are checkpointed, possibly several times."""

    def __init__(self, times: int = 1, *, reentrant: bool, shared: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if shared:
            self.last.weight = self.first.weight
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None
        self.times = times
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


@scenarios.add(reentrant=BOTH, view=BOTH, bucket_cap_mb=(None, 1e-4))
def each_layer_is_checkpointed_once(
    make_ddp: MakeDdp, seen: Seen, reentrant: bool, view: bool, bucket_cap_mb: float | None
) -> None:
    model = make_ddp(Checkpointed(reentrant=reentrant), gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb)
    train(model, seen)


@scenarios.add(view=BOTH)
def a_layer_is_checkpointed_twice_without_reentrance(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    train(make_ddp(Checkpointed(2, reentrant=False), gradient_as_bucket_view=view), seen)


@scenarios.add()
def a_layer_is_checkpointed_twice_with_reentrance(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Checkpointed(2, reentrant=True))
    loss = mean_square(model, 0)
    seen.error("backward", loss.backward, sentence=TWICE, names=["middle"])


@scenarios.add()
def a_layer_is_checkpointed_twice_with_reentrance_inside_no_sync(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Checkpointed(2, reentrant=True))
    with model.no_sync():
        mean_square(model, 0).backward()
    seen.gradients("inside no_sync", model)


@scenarios.add(reentrant=BOTH, shared_and_unused=BOTH, view=BOTH)
def a_layer_is_checkpointed_twice_in_a_static_graph(
    make_ddp: MakeDdp, seen: Seen, reentrant: bool, shared_and_unused: bool, view: bool
) -> None:
    model = make_ddp(
        Checkpointed(2, reentrant=reentrant, shared=shared_and_unused, unused=shared_and_unused),
        static_graph=True,
        gradient_as_bucket_view=view,
        bucket_cap_mb=1e-4,
    )
    train(model, seen)


@scenarios.add()
def shared_weights_without_reentrance(make_ddp: MakeDdp, seen: Seen) -> None:
    train(make_ddp(Checkpointed(reentrant=False, shared=True)), seen)


@scenarios.add()
def shared_weights_with_reentrance(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Checkpointed(reentrant=True, shared=True))
    loss = mean_square(model, 0)
    # Of the two names of a shared weight stock takes the last, ours is the one in the state_dict's order.
    seen.error("backward", loss.backward, sentence=TWICE, names=["weight"])


@scenarios.add(unused=BOTH)
def unused_parameters_without_reentrance(make_ddp: MakeDdp, seen: Seen, unused: bool) -> None:
    train(make_ddp(Checkpointed(reentrant=False, unused=unused), find_unused_parameters=True), seen)


@scenarios.add()
def finding_unused_parameters_with_reentrance(make_ddp: MakeDdp, seen: Seen) -> None:
    # What is inside a reentrant checkpoint is not in the graph, so its parameters seem unused.
    model = make_ddp(Checkpointed(reentrant=True), find_unused_parameters=True)
    loss = mean_square(model, 0)
    seen.error("backward", loss.backward, sentence=TWICE, names=["last"])


class Segments(nn.Module):
    """Segments of one to three layers, each checkpointed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.segments = nn.ModuleList(make_mlp(depth) for depth in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the segments."""
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=True)
        return x


@scenarios.add()
def everything_is_inside_checkpoints(make_ddp: MakeDdp, seen: Seen) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model(batch(step).requires_grad_()).square().mean()

    train(make_ddp(Segments(), bucket_cap_mb=1e-4), seen, loss_of=loss_of)
