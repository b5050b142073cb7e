"""The search for the best plan, against trying all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.partition import Buckets, buckets_from_cuts, build_table_from_cuts
from overlapscope.bucket_model.plans import default_plan, uniform_plans
from overlapscope.bucket_model.schedule import replay
from overlapscope.bucket_model.search import find_best_plan, find_cuts_by_count
from tests.bucket_model.jobs import costs_of, jobs, work_of_job
from tests.bucket_model.oracle import Job


def every_plan(job: Job, buckets: int | None = None) -> list[Buckets]:
    places = range(len(job.sizes) - 1)
    counts = range(len(job.sizes)) if buckets is None else [buckets - 1]
    plans = []
    for count in counts:
        for chosen in combinations(places, count):
            cuts = np.zeros(len(job.sizes), dtype=bool)
            cuts[list(chosen)] = True
            plans.append(buckets_from_cuts(cuts, job.gradients))
    return plans


@given(job=jobs(plain=True), copy_in=st.sampled_from([(0.0, 0.0), (3.0, 0.25)]))
def test_for_each_number_of_buckets_no_plan_ends_earlier(job: Job, copy_in: tuple[float, float]) -> None:
    job = replace(job, tail=0.0, copy_in=copy_in)
    work, costs = work_of_job(job), costs_of(job)
    found = find_cuts_by_count(work, costs)
    assert len(found) == len(job.sizes)
    for count, cuts in enumerate(found, start=1):
        of_count = replay(every_plan(job, count), work, costs).cycle_ns[:, 0]
        assert cuts.sum() == count
        assert replay(build_table_from_cuts(cuts[None], job.gradients), work, costs).cycle_ns[0, 0] == pytest.approx(
            of_count.min()
        )


@given(job=jobs(plain=True))
def test_the_best_plan_is_the_best_of_all(job: Job) -> None:
    work, costs = work_of_job(job), costs_of(job)
    found = replay([find_best_plan(work, costs)], work, costs).cycle_ns[0, 0]
    assert found == pytest.approx(replay(every_plan(job), work, costs).cycle_ns.min(), rel=1e-3)


@given(job=jobs(kinds=True), other=st.floats(0.5, 2.0))
def test_whatever_the_job_it_is_no_worse_than_the_default_or_any_cap(job: Job, other: float) -> None:
    slower = replace(job, work=[[other * each for each in rank] for rank in job.work])
    work, costs = work_of_job(job, slower), costs_of(job)
    known = [default_plan(job.gradients), *uniform_plans(job.gradients)]
    best = find_best_plan(work, costs)
    assert sorted(number for bucket in best for number in bucket) == list(range(len(job.sizes)))
    assert all(len({job.kinds[number] for number in bucket}) == 1 for bucket in best)
    mean_ns = replay([best, *(plan.buckets for plan in known)], work, costs).cycle_ns.mean(axis=1)
    assert mean_ns[0] <= mean_ns.min() * 1.001


def test_a_large_last_gradient_is_sent_alone_which_no_single_size_can_express() -> None:
    """Small gradients first, whose latency is worth saving, then medium ones, then a small one at the very end."""
    job = Job(
        sizes=[2] * 10 + [40] * 4 + [2],
        start=[0.0],
        work=[[5.0] * 10 + [40.0] * 4 + [5.0]],
        wire=(10.0, 0.8),
    )
    work, costs = work_of_job(job), costs_of(job)
    uniform = replay([plan.buckets for plan in uniform_plans(job.gradients)], work, costs).cycle_ns.min()
    best = replay([find_best_plan(work, costs)], work, costs).cycle_ns[0, 0]
    assert best <= uniform
    assert best == pytest.approx(replay(every_plan(job), work, costs).cycle_ns.min())
