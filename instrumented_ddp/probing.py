"""``record --probe-buckets``: run other bucket plans for a few steps each, and then the user's own again.

One plan holds few sizes of collectives, from which latency and bandwidth can't be told apart. The sums that ranks get
do not depend on the plan, up to the order of additions among three and more ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist

from instrumented_ddp.agreement import agree_on_numbers, agree_on_plan
from instrumented_ddp.bucket_plan import BucketPlan, kinds_of
from instrumented_ddp.plan_schedule import PlanChange
from instrumented_ddp.recorder import Recorder
from overlapscope.model.partition import Gradients
from overlapscope.model.probe import probe
from overlapscope.trace.environment import recording_from_environment

_WARM_UP_STEPS: Final = 3


def is_asked_to_probe(trace: Path) -> bool:
    """Whether this process is to probe bucket plans while it records into this folder."""
    recording = recording_from_environment(trace)
    return recording is not None and recording.probe_buckets


class Probing:
    """The probing of one model's bucket plans; a ``PlanSchedule``.

    Args:
        recorder: told how far it has come, if there is one.
        model: its number in the recording.
    """

    def __init__(self, recorder: Recorder | None, model: int) -> None:
        self._recorder = recorder
        self._model = model
        self._own: BucketPlan | None = None
        self._plans: list[BucketPlan] = []
        self._plan_of_step: list[int] = []
        self._begin_after = 0
        self._has_begun = False
        self._is_impossible = False
        self.is_over = False
        """Whether the plans have been run, or can't be, and the user's own is in force."""
        self._say("waiting")

    @property
    def is_possible(self) -> bool:
        """Nothing is in its way yet."""
        return not (self.is_over or self._is_impossible)

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, everybody_would: bool
    ) -> None:
        """Agree on the plans to run. Called on all ranks at the same time.

        Args:
            own: the plan to return to.
            order: in which gradients are expected.
            after: so many reductions.
            everybody_would: whether all ranks were asked to probe.
        """
        self._has_begun = False
        if not everybody_would:
            self.is_impossible("not all ranks were asked to, or they don't compare what they do (init_sync=False)")
            return
        if group.size() == 1:
            self.is_impossible("a single rank has nothing to reduce")
            return
        self._plans, self._plan_of_step = agree_on_probe(own, order, group)
        if len(self._plans) == 1:
            self.is_impossible("the model is so small that every bucket size gives the same plan")
            return
        self._own = own
        self._begin_after = after + _WARM_UP_STEPS
        self._say("waiting")

    def is_impossible(self, why: str) -> None:
        """Leave it, and say so in the recording."""
        if self.is_possible:
            self._is_impossible = True
            self._say("impossible", why=why)

    def change_after(self, reductions: int) -> PlanChange | None:
        """The plan whose turn it is."""
        if self._own is None or self._is_impossible:
            return self._return()
        if reductions < self._begin_after:
            return None
        if not self._has_begun:
            self._has_begun = True
            self._say("begun")
        step = reductions - self._begin_after
        if step < len(self._plan_of_step):
            return PlanChange(plan=self._plans[self._plan_of_step[step]], reason="probe")
        self._say("done")
        return self._return()

    def _return(self) -> PlanChange | None:
        self.is_over = True
        return PlanChange(plan=self._own, reason="return") if self._own is not None and self._has_begun else None

    def _say(self, state: str, **more: Any) -> None:
        steps = {"first_step": self._begin_after, "steps": len(self._plan_of_step), "plans": len(self._plans)}
        if self._recorder is not None:
            self._recorder.probing_is(self._model, {"state": state, **(steps if self._plan_of_step else {}), **more})


def agree_on_probe(
    own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup
) -> tuple[list[BucketPlan], list[int]]:
    """Rank 0's probe on every rank. Called on all ranks.

    Args:
        own: the plan in force.
        order: in which gradients are expected.

    Returns:
        The plans, and which of them each step runs with.
    """
    device = own.parameters[0].device
    proposed = probe(gradients_of(own, order))
    plan_of_step = agree_on_numbers(proposed.plan_of_step.tolist(), group, device)
    plans = [BucketPlan(own.parameters, buckets) for buckets in proposed.plans]
    # What other ranks propose is not looked at, and may be more or less.
    plans = plans if group.rank() == 0 else [own] * (max(plan_of_step) + 1)
    return [agree_on_plan(plan, group, device) for plan in plans], plan_of_step


def gradients_of(plan: BucketPlan, order: Sequence[int]) -> Gradients:
    """A plan's parameters as the model of ``overlapscope.model`` wants them.

    Args:
        order: of the gradients, as far as it is known.
    """
    parameters = plan.parameters
    known = set(order)
    rest = [index for index in range(len(parameters)) if index not in known]
    return Gradients(
        names=tuple(spec.name for spec in parameters),
        bytes=np.array([spec.bytes for spec in parameters], np.int64),
        kinds=np.array(kinds_of(parameters), np.int64),
        order=np.array([*order, *rest], np.int64),
    )
