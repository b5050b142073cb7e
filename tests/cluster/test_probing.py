"""``record --probe-buckets``: other plans are run and recorded, and the training comes to the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from instrumented_ddp import DistributedDataParallel
from overlapscope.cli.record import describe_probing
from overlapscope.trace.environment import DETAIL_VARIABLE, PROBE_VARIABLE
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks
from tests.cluster.same_as_stock.training import batch

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WIDTH = 192
STEPS = 34
State = list[list[float]]


def make_model() -> nn.Sequential:
    """A megabyte of parameters."""
    torch.manual_seed(4)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def train(model: nn.Module, steps: int, seed: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        # Every other step keeps gradients in place, so that autograd adds to what is already there.
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 5 == 3:
            with model.no_sync():
                model(batch(100 + step, 4, WIDTH)).square().mean().backward()
        model(batch(step + seed, 4, WIDTH)).square().mean().backward()
        optimizer.step()


def state_after_training(trace: str, probe: bool, options: dict[str, bool]) -> State:
    os.environ[PROBE_VARIABLE] = "1" if probe else "0"
    os.environ[DETAIL_VARIABLE] = "parameters"
    model = DistributedDataParallel(make_model(), trace=trace, **options)
    train(model, STEPS)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def plans_in(trace: Path) -> list[dict]:
    return [json.loads(line) for line in (trace / "rank_0" / "plans.jsonl").read_text().splitlines()]


def probing_of(trace: Path) -> dict:
    (model,) = json.loads((trace / "rank_0" / "run.json").read_text())["models"]
    return model["probing"]


@pytest.mark.parametrize(
    "option",
    [
        "find_unused_parameters",
        *(
            pytest.param(option, marks=pytest.mark.nightly)
            for option in (None, "gradient_as_bucket_view", "static_graph")
        ),
    ],
)
def test_two_ranks_come_to_the_same_parameters_to_the_bit(tmp_path, option):
    options = {option: True} if option else {}
    probed = run_ranks(state_after_training, 2, str(tmp_path / "probed"), True, options)
    plain = run_ranks(state_after_training, 2, str(tmp_path / "plain"), False, options)
    assert probed == plain
    assert probing_of(tmp_path / "probed")["state"] == "done"
    assert {plan["reason"] for plan in plans_in(tmp_path / "plain")} <= {"construction", "rebuild"}


def test_three_ranks_come_to_the_same_parameters_but_for_rounding(tmp_path):
    probed = run_ranks(state_after_training, 3, str(tmp_path / "probed"), True, {})
    plain = run_ranks(state_after_training, 3, str(tmp_path / "plain"), False, {})
    assert probed[0] == probed[1] == probed[2]
    for one, other in zip(probed[0], plain[0], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-6)


def test_every_probed_step_is_recorded_with_its_plan_and_then_the_own_plan_returns(tmp_path):
    run_ranks(state_after_training, 2, str(tmp_path), True, {})
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    plans = {plan["epoch"]: plan for plan in plans_in(tmp_path)}
    reasons = [plans[epoch]["reason"] for epoch in sorted(plans)]
    assert reasons == ["construction", "rebuild", *["probe"] * (len(plans) - 3), "return"]
    assert plans[1]["hash"] == plans[len(plans) - 1]["hash"]
    reduced = trace.collectives.query("op == 'all_reduce'").groupby(["rank", "step"])
    assert (reduced["plan_epoch"].nunique() == 1).all()
    epoch_of_step = reduced["plan_epoch"].first().loc[0]
    assert (epoch_of_step == reduced["plan_epoch"].first().loc[1]).all()
    probing = probing_of(tmp_path)
    first, steps = probing["first_step"], probing["steps"]
    reason_of_step = [plans[epoch]["reason"] for epoch in epoch_of_step]
    assert reason_of_step[:first] == ["construction", *["rebuild"] * (first - 1)]
    assert set(reason_of_step[first : first + steps]) == {"probe"}
    assert set(reason_of_step[first + steps :]) == {"return"}
    assert len({plans[epoch]["hash"] for epoch in epoch_of_step[first : first + steps]}) == probing["plans"] > 2
    assert len(trace.gradients.query("rank == 0")) > 0


def train_unevenly(trace: str, probe: bool) -> State:
    os.environ[PROBE_VARIABLE] = "1" if probe else "0"
    model = DistributedDataParallel(make_model(), trace=trace)
    train(model, 9)
    with model.join():
        train(model, 3 + 4 * dist.get_rank(), seed=50)
    with model.join(enable=False):
        train(model, STEPS, seed=100)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_a_join_in_the_middle_keeps_its_plan_and_probing_goes_on_after_it(tmp_path):
    probed = run_ranks(train_unevenly, 2, str(tmp_path / "probed"), True)
    plain = run_ranks(train_unevenly, 2, str(tmp_path / "plain"), False)
    assert probed == plain
    assert probing_of(tmp_path / "probed")["state"] == "done"


def train_where_rank_0_alone_is_to_probe(trace: str) -> None:
    os.environ[PROBE_VARIABLE] = "1" if dist.get_rank() == 0 else "0"
    train(DistributedDataParallel(make_model(), trace=trace), STEPS)


def test_nothing_is_probed_unless_all_ranks_were_asked_to(tmp_path):
    run_ranks(train_where_rank_0_alone_is_to_probe, 2, str(tmp_path))
    assert [plan["reason"] for plan in plans_in(tmp_path)] == ["construction", "rebuild"]
    assert probing_of(tmp_path)["why"].startswith("not all ranks")


def train_with_a_hook(trace: str, at_step: int) -> list[str]:
    os.environ[PROBE_VARIABLE] = "1"
    model = DistributedDataParallel(make_model(), trace=trace)
    train(model, at_step)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, 3)
    return [plan["reason"] for plan in plans_in(Path(trace))]


@pytest.mark.parametrize("at_step", [0, 10])
def test_a_communication_hook_keeps_the_plan(tmp_path, at_step):
    reasons, _ = run_ranks(train_with_a_hook, 2, str(tmp_path), at_step)
    assert reasons[-1] == ("return" if at_step else "rebuild")
    assert "communication hook" in probing_of(tmp_path)["why"]


def train_briefly(trace: str, steps: int) -> None:
    os.environ[PROBE_VARIABLE] = "1"
    train(DistributedDataParallel(make_model(), trace=trace), steps)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "no bucket plans were probed: the training has fewer than 2 steps"),
        (
            4,
            "no bucket plans were probed: too few steps; 5 plans take 29 steps, outside join(); train for longer",
        ),
        (9, "probed bucket plans for only part of their steps: 5 plans take 29 steps"),
        (29, "probed 5 bucket plans in steps 4 to 27"),
    ],
)
def test_how_far_it_came_is_said_at_the_end(tmp_path, steps, said):
    run_ranks(train_briefly, 2, str(tmp_path), steps)
    (sentence,) = describe_probing(tmp_path)
    assert sentence.startswith(said)


def wrap(trace: str, options: dict[str, bool]) -> None:
    os.environ[PROBE_VARIABLE] = "1"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2), trace=trace, **options)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("world_size", "options", "said"),
    [
        (1, {}, "all-reduce needs at least 2 ranks"),
        (2, {}, "the model is so small that every bucket size gives the same plan"),
        (2, {"find_unused_parameters": True, "init_sync": False}, "ranks don't synchronize (init_sync=False)"),
    ],
)
def test_why_it_is_not_possible_is_said(tmp_path, world_size, options, said):
    run_ranks(wrap, world_size, str(tmp_path), options)
    (sentence,) = describe_probing(tmp_path)
    assert said in sentence
