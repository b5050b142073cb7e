"""What ranks agree on, and what happens when they can't."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.reduction.agreement import DisagreementError
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster


class Branches(nn.Module):
    """Four layers of equal size that each rank runs in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        """Apply the layers named, first to last."""
        for name in order:
            x = torch.tanh(self.layers[name](x))
        return x


def reduce_in_different_orders() -> tuple[list[tuple[int, ...]], list[float], list[float]]:
    torch.manual_seed(0)
    module = Branches()
    model = DistributedDataParallel(module, bucket_cap_mb=1e-6)  # a bucket a parameter
    order = "abcd" if dist.get_rank() == 0 else "dcba"
    means = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4), order).sum().backward()
        means.append([p.grad.sum().item() for p in module.parameters()])
    return list(model.bucket_plan.buckets), means[0], means[2]


def test_buckets_are_reduced_in_plan_order_whatever_order_a_rank_computes_in():
    (plan_0, first_0, last_0), (plan_1, first_1, last_1) = run_ranks(reduce_in_different_orders, 2)
    assert first_0 == first_1
    assert last_0 == last_1 == first_0, "the rebuilt plan gives the same averages"
    assert plan_0 == plan_1, "rank 0's order decides"


def build_with_another_cap_on_each_rank() -> tuple[tuple[int, ...], ...]:
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.02 * (1 + dist.get_rank())
    )
    model(torch.ones(1, 64)).sum().backward()
    model(torch.ones(1, 64)).sum().backward()  # with rebuilt buckets
    return model.bucket_plan.buckets


def test_a_cap_that_differs_between_ranks_is_harmless():
    plan_0, plan_1 = run_ranks(build_with_another_cap_on_each_rank, 2)
    assert plan_0 == plan_1
    assert len(plan_0) > 1


class TwoLayers(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("first")(x) + self.get_submodule("second")(x)


def train_with_parameters_in_another_order(init_sync: bool) -> None:
    names = ["first", "second"] if dist.get_rank() != 1 else ["second", "first"]
    model = DistributedDataParallel(TwoLayers(names), init_sync=init_sync)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize(("world_size", "blame"), [(2, "rank 0 and rank 1"), (3, "rank 1 and all others")])
def test_equal_shapes_in_another_order_are_refused_on_every_rank(world_size, blame, init_sync):
    """At construction; if the user skips that comparison, at the rebuild."""
    errors = run_ranks(train_with_parameters_in_another_order, world_size, init_sync)
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert all(blame in str(error) for error in errors)
    here = "first.weight float32[4, 4] (Linear at first) on rank 0"
    there = "second.weight float32[4, 4] (Linear at second) on rank 1"
    assert all(f"{here}, {there}" in str(error) for error in errors)


def skip_a_branch(trace: str) -> None:
    model = DistributedDataParallel(Branches(), trace=trace)
    model(torch.ones(1, 4), "abd").sum().backward()
    model(torch.ones(1, 4), "abd")


def test_a_parameter_without_a_gradient_is_named_at_the_next_forward(tmp_path):
    errors = run_ranks(skip_a_branch, 2, str(tmp_path))
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        assert f"for rank {rank}: layers.c.weight, layers.c.bias" in str(error)
        assert (tmp_path / f"rank_{rank}" / "incident_1.log").exists(), "what led to it is kept"


def wrap_twice() -> list[float]:
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    first = DistributedDataParallel(module)
    del first
    gc.collect()
    second = DistributedDataParallel(module)
    second(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    return module.weight.grad.flatten().tolist()


def test_a_wrapper_that_is_gone_leaves_no_hooks_behind():
    assert run_ranks(wrap_twice, 2) == [[0.5, 0.5], [0.5, 0.5]]


def reduce_in_a_subgroup() -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    rank = dist.get_rank()
    module = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(module, process_group=groups[rank // 2])
    model(torch.full((1, 1), float(rank))).sum().backward()
    return module.weight.grad.item()


def test_only_the_ranks_of_the_process_group_are_averaged():
    assert run_ranks(reduce_in_a_subgroup, 3) == [0.5, 0.5, 2.0]


def lose_a_peer(trace: str) -> str:
    model = DistributedDataParallel(nn.Linear(256, 256), trace=trace)
    model(torch.ones(1, 256)).sum().backward()
    loss = model(torch.ones(1, 256)).sum()
    if dist.get_rank() == 1:
        raise RuntimeError("gone before the all-reduce")
    loss.backward()
    return "no error"


def test_a_peer_that_is_gone_is_an_error_and_an_incident(tmp_path):
    error, _ = run_ranks(lose_a_peer, 2, str(tmp_path))
    assert isinstance(error, RuntimeError)
    assert (tmp_path / "rank_0" / "incident_1.log").exists()


def keep_the_graph_of_the_gradients() -> tuple[float, float]:
    module = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(module)
    nn.init.constant_(module.weight, 2.0)
    x = torch.full((1, 1), 1.0 + dist.get_rank())
    model(x).square().sum().backward(create_graph=True)  # the gradient is 2wx²
    average = module.weight.grad.item()
    (second,) = torch.autograd.grad(module.weight.grad.sum(), module.weight)  # of this rank's share: 2x²/2
    return average, second.item()


def test_gradients_that_keep_their_graph_are_averaged_and_their_own_gradients_are_not():
    assert run_ranks(keep_the_graph_of_the_gradients, 2) == [(10.0, 1.0), (10.0, 4.0)]
