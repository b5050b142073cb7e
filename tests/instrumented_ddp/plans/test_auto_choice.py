"""``bucket_cap_mb="auto"``: which plans are worth a try, and which of those that were tried stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumented_ddp.plans.auto_choice import (
    STEPS_PER_BLOCK,
    describe_choice,
    fastest,
    propose_candidates,
    step_times_ns,
    trial_blocks,
    trials_of,
)
from overlapscope.bucket_model.plans import default_plan, uniform_plans
from overlapscope.bucket_model.search import MIN_GAIN
from tests.bucket_model.test_fit import probed_job, recording

UNKNOWN = float("nan")


@given(st.integers(2, 4))
def test_in_every_round_each_candidate_has_one_block(candidates: int) -> None:
    blocks = trial_blocks(candidates)
    assert len(blocks) <= 30
    for steps_of_round in np.split(blocks, len(blocks) // (candidates * STEPS_PER_BLOCK)):
        assert sorted(set(steps_of_round.tolist())) == list(range(candidates))
    assert np.bincount(blocks).min() >= 2 * STEPS_PER_BLOCK


def test_the_first_step_of_a_block_does_not_count() -> None:
    candidate = np.array([0, 0, 0, 1, 1, 1])
    length_ns = np.array([99.0, 10.0, 12.0, 99.0, 7.0, UNKNOWN])
    assert step_times_ns(length_ns, candidate, 3).tolist()[:2] == [11.0, 7.0]
    assert np.isnan(step_times_ns(length_ns, candidate, 3)[2])


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=4))
def test_what_stays_is_in_force_already_or_faster_by_what_is_worth_a_change(times_ns: list[float]) -> None:
    chosen = fastest(np.array(times_ns))
    if chosen:
        assert times_ns[chosen] == min(times_ns) < (1 - MIN_GAIN) * times_ns[0]
    else:
        assert min(times_ns) >= (1 - MIN_GAIN) * times_ns[0]


@pytest.mark.parametrize("times_ns", [[UNKNOWN, 1.0], [5.0, UNKNOWN], [UNKNOWN, UNKNOWN]])
def test_what_could_not_be_compared_changes_nothing(times_ns: list[float]) -> None:
    assert fastest(np.array(times_ns)) == 0


def test_a_job_that_is_bound_by_its_network_has_candidates_that_are_predicted_to_be_faster() -> None:
    observations = recording(probed_job(), noise=0.01)
    in_force = default_plan(observations.gradients).buckets
    first, *others = propose_candidates(observations, in_force, lanes=1)
    assert first.buckets == in_force
    assert first.setting == "bucket_cap_mb=None"
    assert others
    assert min(each.predicted_ns for each in others) < (1 - MIN_GAIN) * first.predicted_ns
    assert len({each.buckets for each in (first, *others)}) == 1 + len(others) <= 4


@given(st.integers(0, 40))
@settings(max_examples=10)
def test_whatever_is_in_force_comes_first_and_is_not_tried_twice(place: int) -> None:
    observations = recording(probed_job(), noise=0.01)
    sizes = uniform_plans(observations.gradients)
    in_force = sizes[place % len(sizes)].buckets
    first, *others = propose_candidates(observations, in_force, lanes=2)
    assert first.buckets == in_force
    assert in_force not in [each.buckets for each in others]


def test_a_job_whose_network_is_no_matter_is_left_alone() -> None:
    observations = recording(replace(probed_job(), wire=(1.0, 1e-6)))
    in_force = default_plan(observations.gradients).buckets
    (only,) = propose_candidates(observations, in_force, lanes=1)
    assert only.buckets == in_force


def test_the_reason_is_a_sentence_with_both_times(golden: Callable[[str, str], None]) -> None:
    observations = recording(probed_job(), noise=0.01)
    candidates = propose_candidates(observations, default_plan(observations.gradients).buckets, lanes=1)[:3]
    said = [
        describe_choice(trials_of(candidates, np.array(measured_ns[: len(candidates)])), chosen)
        for measured_ns, chosen in (
            ([20e6, 15e6, 30e6], 1),
            ([20e6, 21e6, 30e6], 0),
            ([UNKNOWN] * 3, 0),
        )
    ]
    said.append(describe_choice(trials_of(candidates[:1], np.array([UNKNOWN])), 0))
    golden("sentences/auto_reasons", "\n".join(said))
