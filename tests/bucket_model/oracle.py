"""The slow truth: one step, event by event, with rates that change at each event. Shares no code with the model.

Also makes up what would have been recorded of such steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlapscope.bucket_model.observation import BucketAllReduces, Observations, Spans
from overlapscope.bucket_model.partition import Buckets, Gradients


@dataclass
class Job:
    """R ranks with P gradients. What a bucket takes is a line of its bytes, as (alpha, beta)."""

    sizes: list[int]
    start: list[float]
    """(R,) when each rank begins backward."""
    work: list[list[float]]
    """(R, P) compute before each gradient, by parameter number."""
    tail: float = 0.0
    """Compute after the last gradient."""
    wire: tuple[float, float] = (0.0, 1.0)
    copy_in: tuple[float, float] = (0.0, 0.0)
    copy_out: tuple[float, float] = (0.0, 0.0)
    s: float = 1.0
    c: float = 1.0
    lanes: int = 1
    lane_slowdown: float = 2.0
    """Of each of two that are sent together."""
    order: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = self.order or list(range(len(self.sizes)))
        self.kinds = self.kinds or [0] * len(self.sizes)

    @property
    def gradients(self) -> Gradients:
        return Gradients(
            names=tuple(f"p{number}" for number in range(len(self.sizes))),
            bytes=np.array(self.sizes),
            kinds=np.array(self.kinds),
            order=np.array(self.order),
        )


@dataclass
class Step:
    """What happened, from the end of the copies of the step before."""

    ready: npt.NDArray[np.float64]
    """(R, P) by parameter number."""
    launch: npt.NDArray[np.float64]
    """(R, B)"""
    start: npt.NDArray[np.float64]
    """(B,)"""
    end: npt.NDArray[np.float64]
    """(B,)"""
    backward_end: npt.NDArray[np.float64]
    """(R,)"""
    copied: float
    """When the last copy back is over."""


class _Rank:
    """Does one thing after the other: tasks of (what, number, compute it takes)."""

    def __init__(self, job: Job, rank: int, plan: Buckets) -> None:
        self.tasks: list[tuple[str, int, float]] = [("begin", 0, job.start[rank])]
        missing = [set(bucket) for bucket in plan]
        for number in job.order:
            self.tasks.append(("gradient", number, job.work[rank][number]))
            bucket = next(place for place, left in enumerate(missing) if number in left)
            missing[bucket].discard(number)
            if not missing[bucket]:
                self.tasks.append(("copied", bucket, _line(job.copy_in, _bytes(job, plan[bucket]))))
        self.tasks.append(("end", 0, job.tail))
        self.left = self.tasks[0][2]
        self.ready: dict[int, float] = {}
        self.copied: dict[int, float] = {}
        self.end = 0.0

    def finish_tasks(self, now: float) -> None:
        while self.tasks and self.left <= 1e-9:
            what, number, _ = self.tasks.pop(0)
            if what == "gradient":
                self.ready[number] = now
            elif what == "copied":
                self.copied[number] = now
            elif what == "end":
                self.end = now
            self.left = self.tasks[0][2] if self.tasks else 0.0

    def launched(self, bucket: int) -> bool:
        return all(place in self.copied for place in range(bucket + 1))


@dataclass
class _Message:
    bucket: int
    latency: float
    bytes: float


def simulate(job: Job, plan: Buckets) -> Step:
    ranks = [_Rank(job, rank, plan) for rank in range(len(job.start))]
    launch = np.full((len(ranks), len(plan)), np.nan)
    start, end = np.full(len(plan), np.nan), np.full(len(plan), np.nan)
    flying: list[_Message] = []
    now, waiting = 0.0, 0
    while True:
        _settle(ranks, flying, end, now)
        for place, rank in enumerate(ranks):
            for bucket in range(len(plan)):
                if np.isnan(launch[place, bucket]) and rank.launched(bucket):
                    launch[place, bucket] = now
        while waiting < len(plan) and len(flying) < job.lanes and not np.isnan(launch[:, waiting]).any():
            alpha, beta = job.wire
            flying.append(_Message(waiting, alpha, beta * _bytes(job, plan[waiting])))
            start[waiting] = now
            waiting += 1
            _settle(ranks, flying, end, now)
        if not flying and not any(rank.tasks for rank in ranks):
            break
        computes = any(rank.tasks for rank in ranks)
        compute_rate = 1 / job.s if flying else 1.0
        rate = 1 / job.c if computes else 1.0
        sending = [message for message in flying if message.latency <= 1e-9]
        left = [rank.left / compute_rate for rank in ranks if rank.tasks]
        left += [message.latency / rate for message in flying if message.latency > 1e-9]
        sending_rate = rate / job.lane_slowdown if len(sending) > 1 else rate
        left += [message.bytes / sending_rate for message in sending]
        step = min(left)
        now += step
        for rank in ranks:
            rank.left -= step * compute_rate
        for message in flying:
            if message in sending:
                message.bytes -= step * sending_rate
            else:
                message.latency -= step * rate
    copied = max(rank.end for rank in ranks)
    for bucket, finished in zip(plan, end, strict=True):
        copied = max(copied, finished) + _line(job.copy_out, _bytes(job, bucket))
    ready = np.array([[rank.ready[number] for number in range(len(job.sizes))] for rank in ranks])
    backward_end = np.array([rank.end for rank in ranks])
    return Step(ready=ready, launch=launch, start=start, end=end, backward_end=backward_end, copied=copied)


def observe(jobs: list[Job], plans: list[Buckets]) -> Observations:
    """What is recorded of steps, each with a job and a plan of its own; the model is the same in all."""
    gradients, ranks = jobs[0].gradients, len(jobs[0].start)
    distinct = list(dict.fromkeys(plans))
    steps = [simulate(job, plan) for job, plan in zip(jobs, plans, strict=True)]
    head = [0.0] + [step.copied - max(step.end.max(), step.backward_end.max()) for step in steps[:-1]]
    starts = np.array([job.start for job in jobs])
    rows = [(cycle, bucket) for cycle, plan in enumerate(plans) for bucket in range(len(plan))]
    end = np.array([steps[cycle].end[bucket] + head[cycle] for cycle, bucket in rows])
    launch = np.array([steps[cycle].launch[:, bucket] + head[cycle] for cycle, bucket in rows])
    cycle = np.array([cycle for cycle, _ in rows])
    sizes = np.array([_bytes(jobs[0], plans[cycle][bucket]) for cycle, bucket in rows])

    def spans(line: tuple[float, float]) -> Spans:
        if line == (0.0, 0.0):
            return Spans(bytes=np.empty(0), time_ns=np.empty(0), cycle=np.empty(0, dtype=np.int64))
        return Spans(bytes=sizes.astype(float), time_ns=line[0] + line[1] * sizes, cycle=cycle)

    return Observations(
        gradients=gradients,
        world_size=ranks,
        ranks=np.arange(ranks),
        has_common_clock=True,
        plans=tuple(distinct),
        steps=np.arange(len(plans)) + 10,
        plan=np.array([distinct.index(plan) for plan in plans]),
        previous_plan=np.array([-1] + [distinct.index(plan) for plan in plans[:-1]]),
        cycle_ns=np.array([[step.end.max() + before] * ranks for step, before in zip(steps, head, strict=True)]),
        copies_out_ns=np.repeat(np.array(head)[:, None], ranks, axis=1),
        backward_start_ns=starts + np.array(head)[:, None],
        ready_ns=np.array([step.ready for step in steps]) - starts[:, :, None],
        backward_end_ns=np.array([step.backward_end for step in steps]) - starts,
        collectives=BucketAllReduces(
            cycle=cycle,
            bucket=np.array([bucket for _, bucket in rows]),
            bytes=sizes,
            launch_ns=launch,
            end_ns=np.repeat(end[:, None], ranks, axis=1),
            transfer_ns=end - launch.max(axis=1),
        ),
        copies_in=spans(jobs[0].copy_in),
        copies_out=spans(jobs[0].copy_out),
    )


def _settle(ranks: list[_Rank], flying: list[_Message], end: npt.NDArray[np.float64], now: float) -> None:
    for rank in ranks:
        rank.finish_tasks(now)
    for message in list(flying):
        if message.latency <= 1e-9 and message.bytes <= 1e-9:
            end[message.bucket] = now
            flying.remove(message)


def _bytes(job: Job, bucket: tuple[int, ...]) -> int:
    return sum(job.sizes[number] for number in bucket)


def _line(line: tuple[float, float], bytes_: int) -> float:
    return line[0] + line[1] * bytes_
