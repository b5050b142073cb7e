"""``bucket_plan=``: what it does to the buckets, to nothing else, and what is said of a plan for another module."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.bucket_plan import describe_parameters
from overlapscope.bucket_model.plan_file import PlanFile, write_plan
from overlapscope.errors import OverlapScopeError
from tests.cluster.beside_stock import train_both
from tests.cluster.models import make_model
from tests.cluster.plans import as_file, random_plan
from tests.cluster.ranks import run_ranks
from tests.cluster.same_as_stock.training import Branches, batch

pytestmark = pytest.mark.cluster

Buckets = tuple[tuple[str, ...], ...]


def plan_of(module: nn.Module, seed: int) -> PlanFile:
    parameters = list(module.parameters())
    return as_file(random_plan(describe_parameters(module, parameters, [False] * len(parameters)), seed))


def buckets_of(model: DistributedDataParallel) -> Buckets:
    plan = model.bucket_plan
    return tuple(tuple(plan.parameters[index].name for index in bucket) for bucket in plan.buckets)


def train_beside_stock(folder: str, options: dict[str, bool]) -> list[str]:
    """Train with a plan that rank 0 alone has, and with stock DDP; list where they part."""
    rank = dist.get_rank()
    differences = []
    cases = (("mlp", torch.float32), ("mlp", torch.bfloat16), ("transformer", torch.float32))
    for seed, (name, dtype) in enumerate(cases[:2] if options else cases):
        file = Path(folder) / f"plan_{seed}_{rank}.json"
        plan = plan_of(make_model(name, dtype), seed)
        if rank == 0:
            write_plan(file, plan)
        ours = DistributedDataParallel(make_model(name, dtype), bucket_plan=file, **options)
        stock = nn.parallel.DistributedDataParallel(make_model(name, dtype), **options)
        differences += [f"{name} {dtype}: {what}" for what in train_both(name, dtype, rank, ours, stock)]
        if buckets_of(ours) != plan.buckets:
            differences.append(f"{name} {dtype}: another plan is in force")
    return differences


@pytest.mark.parametrize("option", [None, "gradient_as_bucket_view", "static_graph", "find_unused_parameters"])
def test_with_any_plan_gradients_equal_stock_ddp_to_the_bit(tmp_path, option):
    assert run_ranks(train_beside_stock, 2, str(tmp_path), {option: True} if option else {}) == [[], []]


def plans_in_force(**options: bool) -> tuple[Buckets, list[Buckets]]:
    plan = plan_of(Branches(), seed=1)
    model = DistributedDataParallel(Branches(), bucket_plan=plan, **options)
    seen = [buckets_of(model)]
    for step in range(3):
        model(batch(step), "abcd").sum().backward()
        seen.append(buckets_of(model))
    return plan.buckets, seen


@pytest.mark.parametrize(
    ("options", "from_when"), [({}, 2), ({"static_graph": True}, 3), ({"find_unused_parameters": True}, 0)]
)
def test_a_plan_takes_effect_where_stock_rebuilds_and_at_once_where_it_does_not(options, from_when):
    for plan, seen in run_ranks(partial(plans_in_force, **options), 2):
        assert [buckets == plan for buckets in seen] == [place >= from_when for place in range(4)]


def train_mixed(gradient_as_bucket_view: bool) -> tuple[list[str], bool]:
    def mixed() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8))

    def run(model: nn.Module) -> list[torch.Tensor]:
        first, second, third = model.module
        for step in range(3):
            model.zero_grad()
            outputs = model(batch(step))
            outputs.sum().backward()
        return [parameter.grad for layer in (first, second, third) for parameter in layer.parameters()]

    class Casting(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[2](self[1](self[0](x).double()).float())

    plan = plan_of(Casting(*mixed()), seed=3)
    ours = DistributedDataParallel(Casting(*mixed()), bucket_plan=plan, gradient_as_bucket_view=gradient_as_bucket_view)
    stock = nn.parallel.DistributedDataParallel(Casting(*mixed()), gradient_as_bucket_view=gradient_as_bucket_view)
    differing = [str(i) for i, pair in enumerate(zip(run(ours), run(stock), strict=True)) if not torch.equal(*pair)]
    return differing, buckets_of(ours) == plan.buckets


@pytest.mark.parametrize("view", [False, True])
def test_parameters_of_several_dtypes_may_be_planned(view):
    assert run_ranks(train_mixed, 2, view) == [([], True)] * 2


def train_unevenly() -> tuple[bool, list[list[float]]]:
    plan = plan_of(Branches(), seed=5)
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), bucket_plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(1 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            model(batch(step), "abcd").square().mean().backward()
            optimizer.step()
    return buckets_of(model) == plan.buckets, [parameter.flatten().tolist() for parameter in model.parameters()]


def test_a_rank_that_has_joined_follows_the_plan():
    (has_plan_0, state_0), (has_plan_1, state_1) = run_ranks(train_unevenly, 2)
    assert has_plan_0
    assert has_plan_1
    assert state_0 == state_1


def wrap_with(what: str, folder: str) -> None:
    plan = plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), seed=0)
    first, *others = plan.parameters
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    given: object = plan
    if what == "no file":
        given = f"{folder}/nowhere.json"
    elif what == "missing":
        module.add_module("more", nn.Linear(2, 2))
    elif what == "unknown":
        module[1].bias.requires_grad_(False)
    elif what == "size":
        given = replace(plan, parameters=(replace(first, shape=(8, 4)), *others))
    elif what == "dtype":
        module[1].double()
    DistributedDataParallel(module, bucket_plan=given if dist.get_rank() == 0 else None)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no file", "nowhere.json"),
        ("missing", "bucket_plan: the bucket plan lacks more.weight"),
        ("unknown", "bucket_plan: the bucket plan has 1.bias, which is not trained here"),
        ("size", "the bucket plan is for 0.weight of 8×4 float32, but here it is 4×4 float32"),
        ("dtype", "the bucket plan is for 1.weight of 2×4 float32, but here it is 2×4 float64"),
    ],
)
def test_what_is_wrong_with_rank_0s_plan_is_one_line_on_every_rank(tmp_path, what, said):
    errors = run_ranks(wrap_with, 2, what, str(tmp_path))
    assert [type(error) for error in errors] == [OverlapScopeError] * 2
    assert str(errors[0]) == str(errors[1])
    assert said in str(errors[0])
    assert "\n" not in str(errors[0])


def train_after_pickling() -> list[bool]:
    plan = plan_of(Branches(), seed=1)
    results = []
    for options in ({}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(Branches(), bucket_plan=plan, **options)
        again = pickle.loads(pickle.dumps(model))
        for step in range(2):
            again(batch(step), "abcd").sum().backward()
        results.append(buckets_of(again) == plan.buckets)
    return results


def test_a_plan_survives_pickling():
    assert run_ranks(train_after_pickling, 2) == [[True, True]] * 2
