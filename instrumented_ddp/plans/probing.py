"""``record --probe-buckets``: run other bucket plans for a few steps each, and then the user's own again.

One plan has few sizes of collectives, from which latency and bandwidth can't be separated. The sums that ranks get
do not depend on the plan, except for the order of additions among three or more ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.plans.probed_steps import WARM_UP_STEPS, ProbedSteps, agree_on_probe, warm_up
from instrumented_ddp.plans.schedule import PlanChange
from instrumented_ddp.recording.recorder import Recorder
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import read_recording_options


def is_asked_to_probe(trace: Path) -> bool:
    """Return whether this process is to probe bucket plans while it records into this folder."""
    recording = read_recording_options(trace)
    return recording is not None and recording.probe_buckets


class Probing:
    """The probing of one model's bucket plans; a ``PlanSchedule``.

    Args:
        recorder: notified of the progress, if there is one.
        model: number of the model in the recording.
    """

    def __init__(self, recorder: Recorder | None, model: int) -> None:
        self._recorder = recorder
        self._model = model
        self._own: BucketPlan | None = None
        self._probed: ProbedSteps | None = None
        self._changes: Iterator[PlanChange | None] = iter(())
        self._reductions = self._begin_after = 0
        self._has_begun = False
        self._is_impossible = False
        self.is_over = False
        """True if the plans were run, or can't be, and the user's own plan is active."""
        self._note_state("waiting")

    @property
    def is_possible(self) -> bool:
        """Return whether nothing prevents it so far."""
        return not (self.is_over or self._is_impossible)

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, all_ranks_agree: bool
    ) -> None:
        """Agree on the plans to run. Called on all ranks at the same time.

        Args:
            own: the plan to return to.
            order: order in which gradients are expected.
            after: number of reductions after which it begins.
            everybody_would: whether all ranks requested it.
        """
        self._has_begun = False
        try:
            self._probed = agree_on_probe(own, order, group, all_ranks_agree=all_ranks_agree)
        except OverlapScopeError as error:
            self.give_up(str(error))
            return
        self._own = own
        self._begin_after = after + WARM_UP_STEPS
        self._changes = chain(warm_up(lambda: self._reductions, after), self._probed.changes())
        self._note_state("waiting")

    def give_up(self, why: str) -> None:
        """Give up, and note the reason in the recording."""
        if self.is_possible:
            self._is_impossible = True
            self._note_state("impossible", why=why)

    def change_after(self, reductions: int) -> PlanChange | None:
        """Return the plan of the next step."""
        if self._own is None or self._is_impossible:
            return self._return()
        self._reductions = reductions
        try:
            change = next(self._changes)
        except StopIteration:
            self._note_state("done")
            return self._return()
        if change is not None and not self._has_begun:
            self._has_begun, self._begin_after = True, reductions
            self._note_state("begun")
        return change

    def _return(self) -> PlanChange | None:
        self.is_over = True
        return PlanChange(plan=self._own, reason="return") if self._own is not None and self._has_begun else None

    def _note_state(self, state: str, **more: Any) -> None:
        if self._recorder is None:
            return
        if (probed := self._probed) is not None:
            more |= {"first_step": self._begin_after, "steps": len(probed.plan_of_step), "plans": len(probed.plans)}
        self._recorder.set_model_info(self._model, "probing", {"state": state, **more})
