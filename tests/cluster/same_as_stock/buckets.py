"""Which gradients share a bucket, before and after the rebuild, and what the wrapper logs of itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import Branches, batch, logged, make_mlp, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios()
BOTH = (False, True)


def make_wide_mlp() -> nn.Sequential:
    """Parameters of 1 MB and 2 kB in turn."""
    return make_mlp(depth=5, width=512)


def train_and_note_buckets(model: nn.parallel.DistributedDataParallel, seen: Seen, *shape: int) -> None:
    seen.note("logged at construction", logged(model))
    for step in range(3):
        model(batch(step, *shape)).square().mean().backward()
        seen.note(f"step {step}: logged", logged(model))
    seen.note("has rebuilt", model._has_rebuilt_buckets)


@scenarios.add(bucket_cap_mb=(None, 25, 2, 1, 0.001, 0), find_unused_parameters=BOTH)
def a_cap(make_ddp: MakeDdp, seen: Seen, bucket_cap_mb: float | None, find_unused_parameters: bool) -> None:
    model = make_ddp(make_wide_mlp(), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused_parameters)
    train_and_note_buckets(model, seen, 2, 512)


@scenarios.add(bucket_cap_mb_list=((1, 2), (2, 0.001, 1), ()), find_unused_parameters=BOTH)
def a_list_of_caps(
    make_ddp: MakeDdp, seen: Seen, bucket_cap_mb_list: Sequence[float], find_unused_parameters: bool
) -> None:
    model = make_ddp(
        make_wide_mlp(), bucket_cap_mb_list=list(bucket_cap_mb_list), find_unused_parameters=find_unused_parameters
    )
    train_and_note_buckets(model, seen, 2, 512)


@scenarios.add()
def a_list_of_caps_overrules_a_cap(make_ddp: MakeDdp, seen: Seen) -> None:
    train_and_note_buckets(make_ddp(make_wide_mlp(), bucket_cap_mb=0.001, bucket_cap_mb_list=[1, 3]), seen, 2, 512)


@scenarios.add(bucket_cap_mb=(None, 0.001), batched_grad_copy=BOTH, view=BOTH)
def gradients_are_copied_a_bucket_at_a_time(
    make_ddp: MakeDdp, seen: Seen, bucket_cap_mb: float | None, batched_grad_copy: bool, view: bool
) -> None:
    model = make_ddp(
        make_mlp(), bucket_cap_mb=bucket_cap_mb, batched_grad_copy=batched_grad_copy, gradient_as_bucket_view=view
    )
    train(model, seen)


class OfTwoDtypes(nn.Module):
    """Layers of float32 and of float64, used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(16, 16, dtype=dtype) for dtype in (torch.float32, torch.float64) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for single, double in zip(self.layers[:3], self.layers[3:], strict=True):
            x = double(single(x.to(torch.float32)).to(torch.float64))
        return x


@scenarios.add(bucket_cap_mb=(None, 0.001), static_graph=BOTH)
def dtypes_do_not_share_a_bucket(
    make_ddp: MakeDdp, seen: Seen, bucket_cap_mb: float | None, static_graph: bool
) -> None:
    model = make_ddp(OfTwoDtypes(), bucket_cap_mb=bucket_cap_mb, static_graph=static_graph)
    train_and_note_buckets(model, seen, 4, 16)


@scenarios.add(static_graph=BOTH, find_unused_parameters=BOTH)
def buckets_follow_the_order_of_the_first_backward(
    make_ddp: MakeDdp, seen: Seen, static_graph: bool, find_unused_parameters: bool
) -> None:
    model = make_ddp(
        Branches(), static_graph=static_graph, find_unused_parameters=find_unused_parameters, bucket_cap_mb=1e-3
    )
    train(model, seen, loss_of=running(lambda step: "cadb" if step == 0 else "abcd"))
    seen.note("logged", logged(model))


@scenarios.add()
def the_construction_tells_of_the_wrapper(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(
        Branches(),
        find_unused_parameters=True,
        static_graph=True,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        bucket_cap_mb=3,
    )
    seen.note("logged", logged(model))
