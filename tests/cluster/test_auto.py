"""``bucket_cap_mb="auto"`` on real ranks: what it decides, what it writes, and that training comes to the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.auto import schedule
from overlapscope.analysis.observations import observations_of
from overlapscope.errors import OverlapScopeError
from overlapscope.model.partition import Buckets
from overlapscope.trace.environment import DETAIL_VARIABLE
from overlapscope.trace.reader import read_trace
from tests.cluster.ranks import run_ranks
from tests.cluster.same_as_stock.training import batch
from tests.cluster.test_probing import State, make_model, plans_in, train

pytestmark = pytest.mark.cluster

STEPS_TO_DECIDE = 70
LAYERS = 8
MS_OF_A_LAYER = 4


class SlowLayer(nn.Module):
    """A gradient of 2 MB that takes some milliseconds: waiting, so that cores are free to communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, 1024))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return SlowGradient.apply(values, self.weight)


class SlowGradient(torch.autograd.Function):
    pause_s = MS_OF_A_LAYER / 1e3

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SlowGradient.pause_s)
        (weight,) = ctx.saved_tensors
        return gradient, torch.ones_like(weight)


def make_slow_model() -> nn.Sequential:
    return nn.Sequential(*[SlowLayer() for _ in range(LAYERS)])


def train_slowly(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()


def choice_in(trace: Path, rank: int = 0) -> dict[str, Any]:
    (model,) = json.loads((trace / f"rank_{rank}" / "run.json").read_text())["models"]
    return model["auto"]


def plan_after_deciding(trace: str | None) -> tuple[Buckets, str, bool]:
    model = DistributedDataParallel(make_slow_model(), bucket_cap_mb="auto", trace=trace)
    train_slowly(model, STEPS_TO_DECIDE)
    return model.bucket_plan.buckets, model.reducer.plan_reason, model.reducer.observer is None


def test_where_other_buckets_overlap_more_it_takes_them():
    first, other = run_ranks(plan_after_deciding, 2, None)
    assert first == other
    buckets, reason, is_unobserved = first
    assert reason == "auto", "the default's second bucket holds all layers but one, and is sent when backward is over"
    assert len(buckets[-1]) < LAYERS - 1
    assert is_unobserved, "nobody is told of anything once the choice is made"


def test_the_trace_says_what_was_done_and_why(tmp_path):
    first, other = run_ranks(plan_after_deciding, 2, str(tmp_path))
    assert first == other
    choice = choice_in(tmp_path)
    (decision,) = choice["decisions"]
    before, chosen = decision["trials"][0], decision["trials"][decision["chosen"]]
    assert choice["state"] == "decided"
    assert before["setting"] == "bucket_cap_mb=None"
    assert chosen["measured_ns"] < before["measured_ns"]
    assert decision["why"].startswith(f"{chosen['setting']} is ")
    assert f" faster than {before['setting']}: steps of " in decision["why"]
    reasons = [plan["reason"] for plan in plans_in(tmp_path)]
    assert reasons[:2] == ["construction", "rebuild"]
    assert set(reasons[2:-1]) == {"probe"}
    assert reasons[-1] == "auto"
    assert choice_in(tmp_path, rank=1) == {"state": "decided", "decisions": []}
    assert read_trace(tmp_path).problems == ()


def state_after_training(bucket_cap_mb: str | None, options: dict[str, bool]) -> State:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_cap_mb, **options)
    train(model, STEPS_TO_DECIDE)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("option", [None, "gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_two_ranks_come_to_the_same_parameters_to_the_bit(option):
    options = {option: True} if option else {}
    assert run_ranks(state_after_training, 2, "auto", options) == run_ranks(state_after_training, 2, None, options)


def decide_twice(trace: str) -> Buckets:
    schedule.FEWEST_STEPS_BETWEEN, schedule.LOOK_EVERY = 40, 10
    model = DistributedDataParallel(make_slow_model(), bucket_cap_mb="auto", trace=trace)
    train_slowly(model, 80)
    SlowGradient.pause_s *= 2
    train_slowly(model, 100)
    return model.bucket_plan.buckets


def test_when_steps_take_another_time_it_decides_again(tmp_path):
    first, other = run_ranks(decide_twice, 2, str(tmp_path))
    assert first == other
    _, second, *_ = choice_in(tmp_path)["decisions"]
    assert second["step"] > 80


def train_with_a_hook(trace: str, at_step: int) -> list[str]:
    model = DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace)
    train(model, at_step)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, 3)
    return [plan["reason"] for plan in plans_in(Path(trace))]


@pytest.mark.parametrize("at_step", [0, 10])
def test_a_communication_hook_keeps_the_plan(tmp_path, at_step):
    reasons, _ = run_ranks(train_with_a_hook, 2, str(tmp_path), at_step)
    assert reasons[-1] == ("return" if at_step else "rebuild")
    assert "communication hook" in choice_in(tmp_path)["why"]


def wrap(trace: str, options: dict[str, Any]) -> None:
    is_for_rank_0_alone = options.pop("rank 0 alone", False)
    wish = "auto" if dist.get_rank() == 0 or not is_for_rank_0_alone else None
    torch.manual_seed(0)
    module = nn.Linear(2, 2) if options.pop("tiny", False) else make_model()
    model = DistributedDataParallel(module, bucket_cap_mb=wish, trace=trace, **options)
    for _ in range(3):
        model(batch(0, 1, 2 if isinstance(module, nn.Linear) else 192)).sum().backward()


@pytest.mark.parametrize(
    ("world_size", "options", "said"),
    [
        (1, {}, "a single rank has nothing to reduce"),
        (2, {"tiny": True}, "the model is so small that every bucket size gives the same plan"),
        (2, {"rank 0 alone": True}, "not all ranks were asked to"),
        (2, {"find_unused_parameters": True, "init_sync": False}, "they don't compare what they do (init_sync=False)"),
    ],
)
def test_why_it_is_not_possible_is_said(tmp_path, world_size, options, said):
    assert run_ranks(wrap, world_size, str(tmp_path), options) == [None] * world_size
    choice = choice_in(tmp_path)
    assert choice["state"] == "impossible"
    assert said in choice["why"]


def wrong_arguments() -> list[str]:
    said = []
    for arguments in (
        {"bucket_cap_mb": "best"},
        {"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1.0]},
        {"bucket_cap_mb": "auto", "bucket_plan": "plan.json"},
    ):
        with pytest.raises(OverlapScopeError) as raised:
            DistributedDataParallel(nn.Linear(2, 2), **arguments)
        said.append(str(raised.value))
    return said


def test_what_can_not_be_meant_is_one_line():
    (said,) = run_ranks(wrong_arguments, 1)
    assert said == [
        "bucket_cap_mb='best': a number of MB is wanted, None or \"auto\"",
        'bucket_cap_mb="auto" and bucket_cap_mb_list both say how large buckets are',
        "bucket_plan and bucket_cap_mb both say how large buckets are; leave one of them out",
    ]


def cycles_measured_while_training(trace: str) -> dict[str, Any]:
    import os

    os.environ[DETAIL_VARIABLE] = "parameters"
    seen = {}
    gathered = schedule.of_all_ranks

    def keep(own: Any, *group: Any) -> Any:
        seen.update(moments_ns=own.moments_ns[0].tolist(), ready_ns=own.ready_ns[0].tolist())
        return gathered(own, *group)

    schedule.of_all_ranks = keep
    train(DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace), 40)
    return seen


def test_it_measures_what_the_analysis_of_the_recording_sees(tmp_path):
    first, _ = run_ranks(cycles_measured_while_training, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    observations = observations_of(trace)
    ready_ns, backward_ns = np.array(first["ready_ns"]), np.array(first["moments_ns"])[:, 3]
    measured_from = int(trace.collectives.query("plan_epoch == 2")["step"].min())
    steps = measured_from + 1 + np.arange(len(backward_ns))  # of the first one nobody saw the step before end
    place = np.searchsorted(observations.steps, steps)
    np.testing.assert_array_equal(observations.steps[place], steps)
    np.testing.assert_array_equal(backward_ns, observations.backward_end_ns[place, 0])
    np.testing.assert_array_equal(ready_ns, observations.ready_ns[place, 0])


def train_with_two_passes_a_step(trace: str) -> None:
    model = DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        for _ in range(2):
            model(batch(0, 4, 192)).square().mean().backward()
        optimizer.step()


def test_steps_that_reduce_twice_are_not_measured_in_a_recording(tmp_path):
    run_ranks(train_with_two_passes_a_step, 2, str(tmp_path))
    (decision,) = choice_in(tmp_path)["decisions"]
    assert decision["why"] == "the buckets stay: only 0 of the measured steps reduced every bucket once on all ranks"
    assert plans_in(tmp_path)[-1]["reason"] == "return"
