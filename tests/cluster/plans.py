"""Bucket plans that nobody would think of, for those who must not care."""

from __future__ import annotations

import random
from collections.abc import Sequence

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, dtype_name
from instrumented_ddp.plans.schedule import PlanChange
from instrumented_ddp.reduction.reducer import Reducer
from overlapscope.bucket_model.plan_file import PlanFile, PlannedParameter


def random_plan(parameters: Sequence[ParameterSpec], seed: int) -> BucketPlan:
    """Parameters in any order, in any buckets that they can share, launched in any order."""
    chance = random.Random(seed)
    order = chance.sample(range(len(parameters)), len(parameters))
    filling: dict[object, list[int]] = {}
    buckets: list[list[int]] = []
    for index in order:
        spec = parameters[index]
        kind = index if spec.is_sparse else (spec.dtype, spec.device)
        filling.setdefault(kind, []).append(index)
        if chance.random() < 0.4:
            buckets.append(filling.pop(kind))
    buckets += filling.values()
    chance.shuffle(buckets)
    return BucketPlan(tuple(parameters), tuple(map(tuple, buckets)))


def as_file(plan: BucketPlan) -> PlanFile:
    """The plan as its file has it."""
    names = [spec.name for spec in plan.parameters]
    return PlanFile(
        parameters=tuple(
            PlannedParameter(name=spec.name, shape=spec.shape, dtype=dtype_name(spec.dtype), bytes=spec.bytes)
            for spec in plan.parameters
        ),
        buckets=tuple(tuple(names[index] for index in bucket) for bucket in plan.buckets),
    )


class Restless:
    """A schedule with another plan after every reduction."""

    is_over = False

    def __init__(self, reducer: Reducer) -> None:
        self._parameters = reducer.plan.parameters
        self.asked: list[int] = []

    def change_after(self, reductions: int) -> PlanChange:
        self.asked.append(reductions)
        return PlanChange(plan=random_plan(self._parameters, reductions), reason="probe")
