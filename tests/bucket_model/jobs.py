"""Random jobs and plans, and the model as it would be were everything known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from overlapscope.bucket_model.cost import CollectiveCost, CostLine
from overlapscope.bucket_model.partition import Buckets, fill_buckets
from overlapscope.bucket_model.schedule import Costs
from overlapscope.bucket_model.work import ComputeTimes
from tests.bucket_model.oracle import Job

times = st.integers(0, 60).map(float)


def cost_of(alpha_ns: float, beta_ns: float, world_size: int = 2) -> CollectiveCost:
    """A straight line."""
    sizes = np.array([1.0, 1e9])
    line = CostLine(alpha_ns=alpha_ns, beta_ns=beta_ns)
    return CollectiveCost(
        world_size=world_size,
        sizes_bytes=sizes[:1],
        times_ns=line.time_ns(sizes[:1]),
        line=line,
        is_identifiable=True,
    )


def costs_of(job: Job) -> Costs:
    return Costs(
        collective=cost_of(*job.wire, world_size=len(job.start)),
        copy_in=CostLine(alpha_ns=job.copy_in[0], beta_ns=job.copy_in[1]),
        copy_out=CostLine(alpha_ns=job.copy_out[0], beta_ns=job.copy_out[1]),
        compute_slowdown=job.s,
        communication_slowdown=job.c,
        lanes=job.lanes,
        lane_slowdown=job.lane_slowdown,
    )


def work_of_job(*jobs: Job) -> ComputeTimes:
    start = np.array([job.start for job in jobs])
    each = np.array([job.work for job in jobs])[:, :, jobs[0].order]
    ready = start[:, :, None] + np.cumsum(each, axis=2)
    return ComputeTimes(
        gradients=jobs[0].gradients,
        ranks=np.arange(start.shape[1]),
        start_ns=start,
        ready_ns=ready,
        end_ns=ready[:, :, -1] + np.array([job.tail for job in jobs])[:, None],
    )


@st.composite
def jobs(draw: st.DrawFn, *, ranks: int | None = None, plain: bool = False, kinds: bool = False) -> Job:
    """Any job.

    Args:
        plain: with one lane, no copies, and no slowdowns.
        kinds: gradients of two types.
    """
    count = draw(st.integers(1, 8))
    ranks = ranks or draw(st.integers(1, 3))
    numbers = st.integers(1, 40)
    job = Job(
        sizes=draw(st.lists(numbers, min_size=count, max_size=count)),
        start=draw(st.lists(times, min_size=ranks, max_size=ranks)),
        work=[draw(st.lists(times, min_size=count, max_size=count)) for _ in range(ranks)],
        tail=draw(times),
        wire=(draw(times), draw(st.sampled_from([0.1, 0.5, 1.0, 3.0]))),
        order=draw(st.permutations(range(count))),
        kinds=draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)) if kinds else [],
    )
    if plain:
        return job
    lines = st.tuples(st.integers(0, 5).map(float), st.sampled_from([0.0, 0.25]))
    return replace(
        job,
        copy_in=draw(lines),
        copy_out=draw(lines),
        s=draw(st.sampled_from([1.0, 1.25, 2.0])),
        c=draw(st.sampled_from([1.0, 1.5])),
        lanes=draw(st.sampled_from([1, 2])),
        lane_slowdown=draw(st.sampled_from([1.0, 1.5, 2.0])),
    )


def plans_of(job: Job) -> st.SearchStrategy[Buckets]:
    limits = st.lists(st.integers(1, sum(job.sizes) + 1), min_size=1, max_size=4)
    return limits.map(lambda limits_bytes: fill_buckets(job.sizes, job.kinds, job.order, limits_bytes))
