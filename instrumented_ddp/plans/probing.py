"""``record --probe-buckets``: run other bucket plans for a few steps each, and then the user's own again.

One plan has few sizes of collectives, from which latency and bandwidth can't be separated. The sums that ranks get
do not depend on the plan, except for the order of additions among three or more ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, number_kinds
from instrumented_ddp.plans.schedule import PlanChange
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.reduction.agreement import agree_on_numbers, agree_on_plan
from overlapscope.bucket_model.partition import Gradients
from overlapscope.bucket_model.plans import plan_probe
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import read_recording_options

# Training with several bucket plans for a few steps each: ``record --probe-buckets``, and the start of
# ``"auto"``.

WARM_UP_STEPS: Final = 3
"""Number of steps that are reduced with the active plan before others are run."""


@dataclass(frozen=True, kw_only=True)
class ProbedSteps:
    """Some plans, and which of them each step runs with."""

    plans: Sequence[BucketPlan]
    plan_of_step: Sequence[int]
    """Index of the plan, by step."""

    def changes(self) -> Iterator[PlanChange]:
        """Return the plan of each step."""
        for plan_index in self.plan_of_step:
            yield PlanChange(plan=self.plans[plan_index], reason="probe")


def agree_on_probe(
    own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, all_ranks_agree: bool
) -> ProbedSteps:
    """Broadcast rank 0's probe to all ranks. Called on all ranks.

    Args:
        own: the active plan.
        order: order in which gradients are expected.
        group: the ranks that reduce.
        all_ranks_agree: whether all of them requested it.

    Raises:
        OverlapScopeError: on every rank, with the reason why nothing can be probed.
    """
    if not all_ranks_agree:
        raise OverlapScopeError("not all ranks were asked to, or ranks don't synchronize (init_sync=False)")
    if group.size() == 1:
        raise OverlapScopeError("all-reduce needs at least 2 ranks")
    device = own.parameters[0].device
    plans, plan_of_step, why_not = [own], [0], ""
    if group.rank() == 0:
        try:
            proposed = plan_probe(gradients_of(own, order))
            plan_of_step = proposed.plan_of_step.tolist()
            plans = [BucketPlan(own.parameters, buckets) for buckets in proposed.plans]
        except Exception as error:  # the others wait for an answer
            why_not = f"choosing bucket plans to measure failed on rank 0 ({type(error).__name__}: {error})"
    plan_of_step = agree_on_numbers(plan_of_step, group, device)
    if group.rank() != 0:
        plans = [own] * (max(plan_of_step) + 1)
    plans = [agree_on_plan(plan, group, device, why_not=why_not) for plan in plans]
    if len(plans) == 1:
        raise OverlapScopeError("the model is so small that every bucket size gives the same plan")
    return ProbedSteps(plans=plans, plan_of_step=plan_of_step)


def gradients_of(plan: BucketPlan, order: Sequence[int]) -> Gradients:
    """Convert a plan's parameters to the input of ``overlapscope.bucket_model``.

    Args:
        order: order of the gradients, as far as it is known.
    """
    parameters = plan.parameters
    known = set(order)
    rest = [index for index in range(len(parameters)) if index not in known]
    return Gradients(
        names=tuple(spec.name for spec in parameters),
        bytes=np.array([spec.bytes for spec in parameters], np.int64),
        kinds=np.array(number_kinds(parameters), np.int64),
        order=np.array([*order, *rest], np.int64),
    )


def is_asked_to_probe(trace: Path) -> bool:
    """Return whether this process is to probe bucket plans while it records into this folder."""
    recording = read_recording_options(trace)
    return recording is not None and recording.probe_buckets


class ProbedSchedule:
    """A ``RequestedSchedule`` that begins with a probe, or all ranks give it up.

    Args:
        recorder: notified of the progress, if there is one.
        model: number of the model in the recording.
        name: name of the progress in the recording.
    """

    def __init__(self, recorder: Recorder | None, model: int, name: str) -> None:
        self._recorder = recorder
        self._model = model
        self._name = name
        self._probed: ProbedSteps
        self._group: dist.ProcessGroup
        self._order: Sequence[int]
        self._plan_changes: Iterator[PlanChange | None] = iter(())
        self._before: BucketPlan | None = None  # set while others are run
        self._reductions = 0
        self._is_impossible = False
        self.is_over = False
        """True if the plan will not change again."""

    @property
    def is_possible(self) -> bool:
        """Return whether nothing prevents it so far."""
        return not (self.is_over or self._is_impossible)

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, all_ranks_agree: bool
    ) -> None:
        """Agree on the plans to run first. Called on all ranks at the same time.

        Args:
            own: the plan to begin with.
            order: order in which gradients are expected.
            group: the ranks that reduce.
            after: number of reductions after which it begins.
            all_ranks_agree: whether all ranks requested it.
        """
        self._before = None
        try:
            self._probed = agree_on_probe(own, order, group, all_ranks_agree=all_ranks_agree)
        except OverlapScopeError as error:
            self.give_up(str(error))
            return
        self._group, self._order = group, order
        self._plan_changes = self._run(own, after)

    def give_up(self, why: str) -> None:
        """Give up, and note the reason in the recording."""
        if self.is_possible:
            self._is_impossible = True
            self._note_state("impossible", why=why)

    def change_after(self, reductions: int) -> PlanChange | None:
        """Return the plan to adopt now. Called together on all ranks, so that it advances by one step each time."""
        self._reductions = reductions
        if not self._is_impossible:
            with suppress(StopIteration):
                return next(self._plan_changes)
        self.is_over = True
        return PlanChange(plan=self._before, reason="return") if self._before is not None else None

    def _run(self, own: BucketPlan, after: int) -> Iterator[PlanChange | None]:
        """Yield the plan of each step, with the arguments of ``agree``."""
        raise NotImplementedError

    def _warm_up(self, after: int) -> Iterator[None]:
        """Keep the active plan for the first steps after a number of reductions."""
        while self._reductions < after + WARM_UP_STEPS:
            yield None

    def _note_state(self, state: str, **more: Any) -> None:
        if self._recorder is not None:
            self._recorder.set_model_info(self._model, self._name, {"state": state, **more})


class Probing(ProbedSchedule):
    """The probing of one model's bucket plans, and then the user's own again."""

    def __init__(self, recorder: Recorder | None, model: int) -> None:
        super().__init__(recorder, model, "probing")
        self._note_state("waiting")

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, all_ranks_agree: bool
    ) -> None:
        """Agree on the plans, and note when they will run; see ``ProbedSchedule.agree``."""
        super().agree(own, order, group, after=after, all_ranks_agree=all_ranks_agree)
        if self.is_possible:
            self._note_probe("waiting", after + WARM_UP_STEPS)

    def _run(self, own: BucketPlan, after: int) -> Iterator[PlanChange | None]:
        yield from self._warm_up(after)
        self._before, first_step = own, self._reductions
        self._note_probe("begun", first_step)
        yield from self._probed.changes()
        self._note_probe("done", first_step)

    def _note_probe(self, state: str, first_step: int) -> None:
        probed = self._probed
        self._note_state(state, first_step=first_step, steps=len(probed.plan_of_step), plans=len(probed.plans))
