"""The replay: cases computed by hand, what must always hold, and a simulation event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.partition import Buckets
from overlapscope.bucket_model.schedule import ReplayResult, replay, replay_step
from tests.bucket_model.jobs import costs_of, jobs, plans_of, work_of_job
from tests.bucket_model.oracle import Job, simulate

ONE_BUCKET: Buckets = ((0, 1, 2),)
THREE_BUCKETS: Buckets = ((0,), (1,), (2,))


def replay_one(job: Job, plan: Buckets) -> ReplayResult:
    return replay([plan], work_of_job(job), costs_of(job))


def three_gradients(**changes: object) -> Job:
    """Backward from 100 to 130 ns, a gradient of 10 bytes every 10 ns; a byte takes 1 ns."""
    return replace(Job(sizes=[10, 10, 10], start=[100.0], work=[[10.0, 10.0, 10.0]]), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "plan", "cycle", "exposed"),
    [
        pytest.param(three_gradients(), ONE_BUCKET, 160, 30, id="one bucket: nothing overlaps"),
        pytest.param(three_gradients(), THREE_BUCKETS, 140, 10, id="compute-bound: only the last bucket shows"),
        pytest.param(three_gradients(wire=(0.0, 3.0)), THREE_BUCKETS, 200, 70, id="communication-bound: 110 + 3 x 30"),
        pytest.param(three_gradients(wire=(5.0, 1.0)), THREE_BUCKETS, 155, 25, id="latency: 110 + 3 x 15"),
        pytest.param(
            three_gradients(start=[100.0, 100.0], work=[[10.0, 10.0, 10.0], [10.0, 40.0, 10.0]]),
            THREE_BUCKETS,
            170,
            10,
            id="a straggler: all wait for its second bucket",
        ),
        pytest.param(
            three_gradients(start=[100.0, 107.0], work=[[10.0, 10.0, 10.0], [10.0, 10.0, 10.0]], wire=(0.0, 2.0)),
            THREE_BUCKETS,
            177,
            40,
            id="arrival skew: the wire waits until 117, then is busy for 60",
        ),
        pytest.param(
            three_gradients(start=[100.0, 90.0], work=[[10.0, 10.0, 10.0], [10.0, 10.0, 40.0]], wire=(0.0, 0.5)),
            THREE_BUCKETS,
            155,
            5,
            id="different last ranks for different buckets",
        ),
        pytest.param(
            three_gradients(wire=(20.0, 1.0), lanes=2),
            THREE_BUCKETS,
            # 0: latency 110-130, sends 130-140. 1: 120-140, sends 140-150. 2: lane free at 140, latency to 160.
            170,
            40,
            id="two lanes hide latency",
        ),
        pytest.param(
            three_gradients(work=[[10.0, 0.0, 40.0]], lanes=2),
            THREE_BUCKETS,
            160,
            10,
            id="two that are sent together share the wire",
        ),
        pytest.param(
            three_gradients(wire=(0.0, 3.0), lanes=2, lane_slowdown=1.5),
            THREE_BUCKETS,
            # 0: alone 110-120, together with 1 120-150. 1: with 2 until 165. 2: with 1 150-165, alone until 185.
            185,
            55,
            id="two that are sent together take half as long again",
        ),
        pytest.param(
            three_gradients(s=2.0),
            THREE_BUCKETS,
            # Sending 0 takes from 110 to 120, when half of the second gradient is computed; 1 from 125 to 135.
            150,
            10,
            id="compute that is slowed down: two halves of 5 ns are lost",
        ),
        pytest.param(
            three_gradients(c=2.0, tail=5.0, work=[[10.0, 30.0, 0.0]]),
            ((0,), (1, 2)),
            # 0: 110 to 130. 1 and 2: from 140, half as fast until 145, then the 17.5 that are left.
            162.5,
            17.5,
            id="communication that is slowed down",
        ),
        pytest.param(
            three_gradients(copy_in=(2.0, 0.0), copy_out=(0.0, 0.5)),
            THREE_BUCKETS,
            # Launches at 112, 124, 136; backward ends at 136. Copies of the first two till 146, the third after 146.
            151,
            10,
            id="copies",
        ),
    ],
)
def test_cases_by_hand(job: Job, plan: Buckets, cycle: float, exposed: float) -> None:
    replayed = replay_one(job, plan)
    assert replayed.cycle_ns[0, 0] == pytest.approx(cycle)
    assert replayed.exposed_ns[0, 0] == pytest.approx(exposed)


@given(job=jobs(kinds=True), data=st.data())
def test_it_is_what_a_simulation_event_by_event_gives(job: Job, data: st.DataObject) -> None:
    plan = data.draw(plans_of(job))
    step, replayed = simulate(job, plan), replay_one(job, plan)
    assert replayed.cycle_ns[0, 0] == pytest.approx(step.copied)
    assert replayed.backward_end_ns[0, 0] == pytest.approx(step.backward_end.max())
    assert replayed.exposed_ns[0, 0] == pytest.approx(max(0.0, step.end.max() - step.backward_end.max()))


@given(job=jobs(kinds=True), data=st.data())
def test_the_timeline_is_that_of_the_simulation(job: Job, data: st.DataObject) -> None:
    plan = data.draw(plans_of(job))
    step, drawn = simulate(job, plan), replay_step(plan, work_of_job(job), costs_of(job))
    np.testing.assert_allclose(drawn.launch_ns, step.launch, atol=1e-6)
    np.testing.assert_allclose(drawn.start_ns, np.broadcast_to(step.start, drawn.start_ns.shape), atol=1e-6)
    np.testing.assert_allclose(drawn.end_ns, np.broadcast_to(step.end, drawn.end_ns.shape), atol=1e-6)
    np.testing.assert_allclose(drawn.backward_end_ns, step.backward_end, atol=1e-6)
    last = [[step.ready[rank, bucket[-1]] for bucket in plan] for rank in range(len(job.start))]
    np.testing.assert_allclose(drawn.ready_ns, last, atol=1e-6)
    assert drawn.cycle_ns == pytest.approx(step.copied)


@given(job=jobs(), data=st.data())
def test_many_plans_and_cycles_at_once_are_each_one_alone(job: Job, data: st.DataObject) -> None:
    other = replace(job, start=[begin + 7 for begin in job.start], tail=job.tail + 3)
    plans = data.draw(st.lists(plans_of(job), min_size=2, max_size=5))
    together = replay(plans, work_of_job(job, other), costs_of(job)).cycle_ns
    alone = [[replay_one(each, plan).cycle_ns[0, 0] for each in (job, other)] for plan in plans]
    np.testing.assert_allclose(together, alone)


@given(job=jobs(), data=st.data())
def test_it_is_never_below_the_critical_path(job: Job, data: st.DataObject) -> None:
    plan = data.draw(plans_of(job))
    cycle_ns = replay_one(job, plan).cycle_ns[0, 0]
    computes = max(start + sum(work) + job.tail for start, work in zip(job.start, job.work, strict=True))
    # Two that are sent side by side take as many times as long as they slow each other down, and not twice as long.
    sends = sum(job.wire[1] * size for size in job.sizes) * min(1.0, job.lane_slowdown / job.lanes)
    assert cycle_ns >= computes - 1e-6
    assert cycle_ns >= min(job.start) + sends - 1e-6


@given(job=jobs(), data=st.data())
def test_twice_the_bandwidth_never_costs_time(job: Job, data: st.DataObject) -> None:
    job = replace(job, s=1.0, c=1.0)
    plan, costs = data.draw(plans_of(job)), costs_of(job)
    faster = replace(costs, collective=costs.collective.scale(byte_time=0.5))
    work = work_of_job(job)
    assert replay([plan], work, faster).cycle_ns[0, 0] <= replay([plan], work, costs).cycle_ns[0, 0] + 1e-6


@given(job=jobs(plain=True))
def test_one_bucket_overlaps_with_nothing_but_the_tail(job: Job) -> None:
    job = replace(job, tail=0.0)
    plan: Buckets = (tuple(job.order),)
    replayed = replay_one(job, plan)
    assert replayed.exposed_ns[0, 0] == pytest.approx(job.wire[0] + job.wire[1] * sum(job.sizes))
