"""Plans that change while a model trains: nothing but the buckets is ever another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.recording import read_trace
from tests.cluster.plans import Restless
from tests.cluster.ranks import run_ranks
from tests.cluster.same_as_stock.training import batch, make_mlp
from tests.cluster.same_as_stock.values import differences_of_values

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SUBJECTS = (
    "backward_passes",
    "buffers",
    "checkpointing",
    "optimizers",
    "parameter_hooks",
    "parameter_kinds",
    "several_models",
    "static_graph",
    "uneven_inputs",
    "unused_parameters",
)
"""Files of scenarios, in ``tests.cluster.same_as_stock``."""
BY_DAY = ("backward_passes", "static_graph", "uneven_inputs")
"""Those that differ most in which gradients come when."""


def restless(*args: Any, **kwargs: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(*args, **kwargs)
    model._plans.schedule = Restless(model._reducer)
    return model


@pytest.mark.parametrize(
    "subject", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly]) for name in SUBJECTS]
)
def test_results_are_stocks_to_the_bit_with_another_plan_after_every_reduction(subject):
    assert run_ranks(differences_of_values, 2, subject, restless) == [[], []]


def asked_by_a_schedule() -> list[int]:
    model = restless(make_mlp())
    schedule = model._plans.schedule
    model(batch(0)).sum().backward()
    with model.no_sync():
        model(batch(1)).sum().backward()
    model(batch(2)).sum().backward()
    for _ in range(3 * dist.get_rank()):  # nobody reduces these
        model(batch(3))
    model(batch(4)).sum().backward()
    with torch.no_grad():
        model(batch(5))
    with model.join():
        for step in range(2 + dist.get_rank()):
            model(batch(step)).sum().backward()
    with model.join(enable=False):
        model(batch(6)).sum().backward()
        model(batch(7)).sum().backward()
    return schedule.asked


def test_all_ranks_ask_after_the_same_reductions_however_often_they_run_forward():
    assert run_ranks(asked_by_a_schedule, 2) == [[0, 1, 2, 6, 7]] * 2


def accumulate_across_a_change(view: bool) -> list[bool]:
    model = DistributedDataParallel(make_mlp(), gradient_as_bucket_view=view)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)).sum().backward()
        optimizer.step()
    with model.no_sync():
        model(batch(2)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    model._plans.schedule = Restless(model._reducer)
    outputs = model(batch(3))
    kept = [torch.equal(one, parameter.grad) for one, parameter in zip(before, model.parameters(), strict=True)]
    kept += [torch.equal(one, state["exp_avg"]) for one, state in zip(moments, optimizer.state.values(), strict=True)]
    outputs.sum().backward()
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in model._reducer.buckets}
    are_views = [parameter.grad.untyped_storage().data_ptr() in buffers for parameter in model.parameters()]
    return [*kept, *(is_view == view for is_view in are_views)]


@pytest.mark.parametrize("view", [False, True])
def test_accumulated_gradients_and_the_optimizer_survive_a_change(view):
    assert all(all(kept) for kept in run_ranks(accumulate_across_a_change, 2, view))


def train_restlessly_recorded(trace: str) -> list[int]:
    model = restless(make_mlp(), trace=trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = []
    for step in range(6):
        optimizer.zero_grad()
        model(batch(step)).sum().backward()
        buckets.append(len(model.bucket_plan.buckets))
        optimizer.step()
    return buckets


def test_every_step_of_a_recording_has_one_plan(tmp_path):
    buckets, _ = run_ranks(train_restlessly_recorded, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    launched = trace.collectives.query("op == 'all_reduce'").groupby(["rank", "step"])
    assert (launched["plan_epoch"].nunique() == 1).all()
    assert [launched.size().loc[0, step] for step in range(6)] == buckets
    assert launched["plan_epoch"].first().loc[0].is_monotonic_increasing
