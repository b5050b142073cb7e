"""``bucket_cap_mb="auto"`` on real ranks: what it decides, what it writes, and that training comes to the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.plans import auto, auto_choice, auto_measuring, probing
from instrumented_ddp.plans.auto_choice import Candidate
from overlapscope.advice.observations import extract_observations
from overlapscope.bucket_model import plans
from overlapscope.bucket_model.observation import BucketCycles, Observations
from overlapscope.bucket_model.partition import Buckets
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import DETAIL_VARIABLE
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks
from tests.cluster.said import said
from tests.cluster.same_as_stock.training import batch
from tests.cluster.test_probing import State, make_model, plans_in, train

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS_TO_DECIDE = 70
BEFORE_NS, BETTER_NS = 10e6, 8e6
"""What steps take with the plan in force and with another, where the clock of the machine is not asked."""


def propose_candidates(observations: Observations, in_force: Buckets, lanes: int) -> list[Candidate]:
    """The plan in force, and all gradients in one bucket."""
    one_bucket = (tuple(observations.gradients.order.tolist()),)
    return [
        Candidate(buckets=in_force, setting="bucket_cap_mb=None", predicted_ns=BEFORE_NS),
        Candidate(buckets=one_bucket, setting="bucket_cap_mb=999", predicted_ns=BETTER_NS),
    ]


def make_one_bucket_faster() -> None:
    auto.propose_candidates = propose_candidates
    auto.step_times_ns = lambda *_: np.array([BEFORE_NS, BETTER_NS])


def choice_in(trace: Path, rank: int = 0) -> dict[str, Any]:
    (model,) = json.loads((trace / f"rank_{rank}" / "run.json").read_text())["models"]
    return model["auto"]


def plan_after_deciding(trace: str | None) -> tuple[Buckets, str, bool]:
    make_one_bucket_faster()
    model = DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace)
    train(model, STEPS_TO_DECIDE)
    return model.bucket_plan.buckets, model._reducer.plan_reason, model._reducer.events.sink is None


def test_what_was_measured_to_be_faster_stays():
    first, other = run_ranks(plan_after_deciding, 2, None)
    assert first == other
    buckets, reason, is_unobserved = first
    assert len(buckets) == 1
    assert reason == "auto"
    assert is_unobserved, "nobody is told of anything once the choice is made"


def test_the_trace_says_what_was_done_and_why(tmp_path):
    first, other = run_ranks(plan_after_deciding, 2, str(tmp_path))
    assert first == other
    auto_choice = choice_in(tmp_path)
    (decision,) = auto_choice["decisions"]
    before, chosen = decision["trials"][0], decision["trials"][decision["chosen"]]
    assert auto_choice["state"] == "decided"
    assert (before["setting"], before["measured_ns"]) == ("bucket_cap_mb=None", BEFORE_NS)
    assert (chosen["setting"], chosen["measured_ns"]) == ("bucket_cap_mb=999", BETTER_NS)
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


@pytest.mark.parametrize(
    "option",
    [
        "static_graph",
        *(
            pytest.param(option, marks=pytest.mark.nightly)
            for option in (None, "find_unused_parameters", "gradient_as_bucket_view")
        ),
    ],
)
def test_two_ranks_come_to_the_same_parameters_to_the_bit(option):
    options = {option: True} if option else {}
    assert run_ranks(state_after_training, 2, "auto", options) == run_ranks(state_after_training, 2, None, options)


def decide_twice(trace: str) -> Buckets:
    make_one_bucket_faster()
    auto.MIN_STEPS_BETWEEN_DECISIONS, auto.CHECK_EVERY_STEPS = 40, 10
    step_ns, now_ns = BETTER_NS, 0.0

    def clock() -> int:
        nonlocal now_ns
        now_ns += step_ns
        return int(now_ns)

    auto.host_now_ns = clock  # which is looked at once a step
    model = DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace)
    train(model, 130)
    step_ns *= 2
    train(model, 100)
    return model.bucket_plan.buckets


def test_when_steps_take_another_time_it_decides_again(tmp_path):
    first, other = run_ranks(decide_twice, 2, str(tmp_path))
    assert first == other
    _, second, *_ = choice_in(tmp_path)["decisions"]
    assert second["step"] > 130


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
        (1, {}, "all-reduce needs at least 2 ranks"),
        (2, {"tiny": True}, "the model is so small that every bucket size gives the same plan"),
        (2, {"rank 0 alone": True}, "not all ranks were asked to"),
        (2, {"find_unused_parameters": True, "init_sync": False}, "ranks don't synchronize (init_sync=False)"),
    ],
)
def test_why_it_is_not_possible_is_said(tmp_path, world_size, options, said):
    assert run_ranks(wrap, world_size, str(tmp_path), options) == [None] * world_size
    auto_choice = choice_in(tmp_path)
    assert auto_choice["state"] == "impossible"
    assert said in auto_choice["why"]


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


def test_what_can_not_be_meant_is_one_line(golden):
    (said,) = run_ranks(wrong_arguments, 1)
    golden("refused/auto_buckets", "\n".join(said))


def cycles_measured_while_training(trace: str) -> dict[str, Any]:
    os.environ[DETAIL_VARIABLE] = "parameters"
    seen = {}
    gathered = auto.gather_cycles

    def keep(own: BucketCycles, *group: Any) -> Any:
        seen.update(moments_ns=own.moments_ns[0].tolist(), ready_ns=own.ready_ns[0].tolist())
        return gathered(own, *group)

    auto.gather_cycles = keep
    train(DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace), 40)
    return seen


def test_it_measures_what_the_analysis_of_the_recording_sees(tmp_path):
    first, _ = run_ranks(cycles_measured_while_training, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    observations = extract_observations(trace)
    ready_ns, backward_ns = np.array(first["ready_ns"]), np.array(first["moments_ns"])[:, 3]
    is_seen = ~np.isnan(backward_ns)  # on a busy machine it may not be known yet when the newest steps have ended
    assert is_seen.any()
    measured_from = int(trace.collectives.query("plan_epoch == 2")["step"].min())
    steps = measured_from + np.flatnonzero(is_seen)  # of the first one nobody saw the step before end
    place = np.searchsorted(observations.steps, steps)
    np.testing.assert_array_equal(observations.steps[place], steps)
    np.testing.assert_array_equal(backward_ns[is_seen], observations.backward_end_ns[place, 0])
    np.testing.assert_array_equal(ready_ns[is_seen], observations.ready_ns[place, 0])


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
    assert [trial["measured_ns"] for trial in decision["trials"]] == [None]
    assert plans_in(tmp_path)[-1]["reason"] == "return"


FAULTS = {
    "measuring": (auto, "Measurement"),
    "a meter": (auto_measuring, "Meter"),
    "a step begins": (auto_measuring.Measurement, "on_step_start"),
    "cycles": (auto_measuring, "compute_bucket_cycles"),
    "observations": (auto, "observations_from_cycles"),
    "gradients": (auto, "gradients_of"),
    "candidates": (auto, "propose_candidates"),
    "step times": (auto, "step_times_ns"),
    "the fastest": (auto, "fastest"),
    "trials": (auto, "trials_of"),
    "a reason": (auto, "describe_choice"),
    "the end": (auto_measuring.Measurement, "end"),
    "whether times have changed": (auto, "_typical_ns"),
    "the log": (auto_measuring, "read_latest_records"),
}
"""What a rank computes without the others."""
OF_RANK_0 = {"observations", "gradients", "candidates", "trials", "a reason"}
OF_RECORDINGS = {"the log"}


class InjectedError(Exception):
    """Something that nobody has thought of."""


def fail(*_: Any, **__: Any) -> Any:
    raise InjectedError


def train_with_faults(trace: str | None, faulty_rank: int) -> dict[str, tuple[State, Buckets, list[str]]]:
    """The weights, the plan and the warnings after a training with each of the faults on one rank, and with none."""
    make_one_bucket_faster()
    auto.MIN_STEPS_BETWEEN_DECISIONS, auto.CHECK_EVERY_STEPS = 2, 1
    auto._WINDOW_STEPS = 2
    plans.PROBED_STEPS, auto_choice.MAX_TRIAL_STEPS = 10, 12
    places = {name: place for name, place in FAULTS.items() if (name in OF_RECORDINGS) == (trace is not None)}
    ended = {}
    for name, (owner, attribute) in {"nothing": (auto, "propose_candidates"), **places}.items():
        works = getattr(owner, attribute)
        if dist.get_rank() == faulty_rank and name != "nothing":
            setattr(owner, attribute, fail)
        with said() as lines:
            model = DistributedDataParallel(make_model()[:4], bucket_cap_mb="auto", trace=trace)
            train(model, 32)
        setattr(owner, attribute, works)
        state = [parameter.flatten().tolist() for parameter in model.parameters()]
        ended[name] = state, model.bucket_plan.buckets, lines
    return ended


@pytest.mark.parametrize(
    ("is_recorded", "faulty_rank"),
    [(False, 0), (True, 0), (True, 1), pytest.param(False, 1, marks=pytest.mark.nightly)],
)
def test_whatever_fails_on_one_rank_the_training_comes_to_the_same_and_it_is_said(tmp_path, faulty_rank, is_recorded):
    ranks = run_ranks(train_with_faults, 2, str(tmp_path) if is_recorded else None, faulty_rank)
    unharmed, _, nothing_said = ranks[0]["nothing"]
    assert nothing_said == []
    for name in ranks[0]:
        for rank in range(2):
            state, plan, said = ranks[rank][name]
            assert state == unharmed, name
            assert plan == ranks[0][name][1], name
            is_hit = rank == faulty_rank and name != "nothing" and (rank == 0 or name not in OF_RANK_0)
            assert all("failed (InjectedError: )" in line for line in said), name
            assert bool(said) == is_hit, name


def train_where_nothing_can_be_proposed(trace: str) -> str:
    if dist.get_rank() == 0:
        probing.plan_probe = fail
    model = DistributedDataParallel(make_model(), bucket_cap_mb="auto", trace=trace)
    train(model, 5)
    return model._reducer.plan_reason


def test_where_rank_0_can_propose_nothing_all_ranks_keep_their_plan(tmp_path):
    assert run_ranks(train_where_nothing_can_be_proposed, 2, str(tmp_path)) == ["rebuild"] * 2
    for rank in range(2):
        assert choice_in(tmp_path, rank)["why"].endswith("failed on rank 0 (InjectedError: )")
