"""``bucket_cap_mb="auto"`` as a ``PlanSchedule``: which step does what.

After some steps of warm-up come 24 steps with several plans, which are measured. Rank 0 predicts from them what every
other plan would take; the best few then train in turns, again measured, and the fastest stays. From then on nothing is
measured but how long steps take, on rank 0. If that has changed a lot 500 steps later or at some time after that,
because the network or the load is another one, it begins again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from instrumented_ddp.agreement import agree_on_numbers, agree_on_plan
from instrumented_ddp.auto.choice import Candidate, candidates_of, fastest, step_times_ns, turns_of
from instrumented_ddp.auto.cycles import observations_of, of_all_ranks
from instrumented_ddp.auto.measuring import Measuring
from instrumented_ddp.auto.report import Decision, reason_for, trials_of
from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collective_log.purposes import Purpose, launched_for
from instrumented_ddp.plan_schedule import PlanChange
from instrumented_ddp.probing import agree_on_probe, gradients_of
from instrumented_ddp.recorder import Recorder
from instrumented_ddp.reducer import Reducer
from instrumented_ddp.timing import host_now_ns
from overlapscope.model.partition import Float64Array
from overlapscope.model.wire import lanes_of_backend

WARM_UP_STEPS: Final = 3
FEWEST_STEPS_BETWEEN: Final = 500
"""Two decisions."""
LOOK_EVERY: Final = 100
"""Steps. Rank 0 then tells the others whether steps have become slower or faster, for which they wait."""
_FEWEST_CYCLES: Final = 6
"""Of the measured steps so many must have been seen whole on all ranks."""
_WINDOW_STEPS: Final = 20
"""Whose median is how long a step takes now."""
_IS_ANOTHER: Final = 0.1
"""Steps that take so much longer or shorter than after the decision are worth another one."""

_KEPT: Final = "the plan in force"

_log = logging.getLogger("instrumented_ddp")


class AutoBuckets:
    """The choice of one model's buckets; a ``WishedSchedule``.

    Args:
        reducer: whose plans change.
        recorder: of the process, if it records.
        model: its number in the recording.
        device: where the model computes.
    """

    def __init__(self, reducer: Reducer, recorder: Recorder | None, model: int, device: torch.device) -> None:
        self._reducer = reducer
        self._recorder = recorder
        self._model = model
        self._device = device
        self._group: dist.ProcessGroup
        self._order: Sequence[int] = ()
        self._probed: list[BucketPlan] = []
        self._plan_of_step: list[int] = []
        self._course: Iterator[PlanChange | None] | None = None
        self._measuring: Measuring | None = None
        self._before: BucketPlan | None = None
        self._is_impossible = False
        self._reductions = 0
        self.decisions: list[Decision] = []
        """So far, on rank 0."""
        self.is_over = False
        """Whether there is nothing more to decide."""
        self._say("waiting")

    @property
    def is_possible(self) -> bool:
        """Nothing is in its way yet."""
        return not (self.is_over or self._is_impossible)

    def agree(
        self,
        own: BucketPlan,
        order: Sequence[int],
        group: dist.ProcessGroup,
        *,
        after: int,  # noqa: ARG002 - it begins with the next step
        everybody_would: bool,
    ) -> None:
        """Begin. Called on all ranks at the same time.

        Args:
            own: the plan to begin with.
            order: in which gradients are expected.
            group: the ranks that reduce.
            after: so many reductions.
            everybody_would: whether all ranks were asked for it.
        """
        self._end_measuring()  # that of a group before, if there was one
        if not everybody_would:
            self.is_impossible("not all ranks were asked to, or they don't compare what they do (init_sync=False)")
        elif group.size() == 1:
            self.is_impossible("a single rank has nothing to reduce")
        else:
            with self._launches():
                plans, self._plan_of_step = agree_on_probe(own, order, group)
            if len(plans) == 1:
                self.is_impossible("the model is so small that every bucket size gives the same plan")
                return
            self._group, self._order, self._probed = group, order, plans
            self._course = self._run()

    def is_impossible(self, why: str) -> None:
        """Leave it, and say so in the recording."""
        if self.is_possible:
            self._is_impossible = True
            self._say("impossible", why=why)

    def change_after(self, reductions: int) -> PlanChange | None:
        """See ``PlanSchedule``. Ranks are asked together, so it is enough to go on by one step each time."""
        self._reductions = reductions
        if self._course is not None and not self._is_impossible:
            return next(self._course)
        self.is_over = True
        if self._measuring is None:
            return None
        assert self._before is not None
        self._end_measuring()
        return PlanChange(plan=self._before, reason="return")

    # -- what each step does -------------------------------------------------------------------------------------

    def _run(self) -> Iterator[PlanChange | None]:
        while True:
            self._say("waiting")
            for _ in range(WARM_UP_STEPS):
                yield None
            before = self._before = self._reducer.plan
            self._measuring = Measuring(self._reducer, self._recorder, self._model, self._device)
            yield from self._probe()
            candidates, measured_steps, why_not = self._candidates(before)
            plans = self._on_all_ranks(candidates, before)
            chosen, measured_ns = 0, np.full(len(plans), np.nan)
            if len(plans) > 1:
                chosen, measured_ns = yield from self._try_in_turns(plans)
            self._end_measuring()
            self._decide(candidates, measured_ns, chosen, measured_steps, why_not)
            yield PlanChange(plan=plans[chosen], reason="auto" if chosen else "return")
            yield from self._wait_for_other_times(float(measured_ns[chosen]))

    def _probe(self) -> Iterator[PlanChange]:
        """Run with several plans."""
        self._say("measuring")
        for place in self._plan_of_step:
            yield self._measured(self._probed[place])

    def _candidates(self, before: BucketPlan) -> tuple[list[Candidate], int, str]:
        """What rank 0 thinks is worth a try, from how many steps it knows, and why it can't. Called on all ranks."""
        assert self._measuring is not None
        with self._launches():
            cycles, ranks = of_all_ranks(self._measuring.cycles(), self._group, self._group_device)
        in_force = Candidate(buckets=before.buckets, setting=_KEPT, predicted_ns=float("nan"))
        whole = cycles.of(cycles.is_whole)
        count = len(whole.epoch)
        if self._group.rank() != 0:
            return [in_force], count, ""
        if count < _FEWEST_CYCLES:
            return [in_force], count, f"only {count} of the measured steps reduced every bucket once on all ranks"
        try:
            plans = [plan.buckets for plan in self._reducer.plans]
            gradients = gradients_of(before, self._order)
            observations = observations_of(whole, ranks, plans, gradients, self._group.size())
            return candidates_of(observations, before.buckets, lanes=lanes_of_backend(self._group.name())), count, ""
        except Exception as error:  # the others wait for an answer, and the training could not care less
            _log.warning("bucket_cap_mb='auto': predicting step times failed", exc_info=True)
            return [in_force], count, f"predicting step times failed ({type(error).__name__}: {error})"

    def _on_all_ranks(self, candidates: Sequence[Candidate], before: BucketPlan) -> list[BucketPlan]:
        """Rank 0's candidates as plans, on every rank."""
        with self._launches():
            (count,) = agree_on_numbers([len(candidates)], self._group, self._group_device)
            plans = [BucketPlan(before.parameters, each.buckets) for each in candidates]
            plans = plans if self._group.rank() == 0 else [before] * count
            return [before, *(agree_on_plan(plan, self._group, self._group_device) for plan in plans[1:])]

    def _try_in_turns(self, plans: Sequence[BucketPlan]) -> Generator[PlanChange, None, tuple[int, Float64Array]]:
        """Run with each plan for some steps. Returns the fastest, and how long steps took, as this rank saw it."""
        self._say("trying")
        turns = turns_of(len(plans))
        for place in turns.tolist():
            yield self._measured(plans[place])
        assert self._measuring is not None
        length_ns = self._measuring.cycles(newest=len(turns)).length_ns
        measured_ns = step_times_ns(length_ns, turns, len(plans))
        with self._launches():
            (chosen,) = agree_on_numbers([fastest(measured_ns)], self._group, self._group_device)
        return chosen, measured_ns

    def _wait_for_other_times(self, usual_ns: float) -> Iterator[None]:
        """Keep the plan, until steps take another time than when it was chosen.

        Args:
            usual_ns: what they took then; NaN if nothing was tried, and then that of the first steps.
        """
        ends_ns: deque[int] = deque(maxlen=_WINDOW_STEPS + 1)
        steps, is_another = 0, 0
        while not is_another:
            steps += 1
            ends_ns.append(host_now_ns())
            if np.isnan(usual_ns) and len(ends_ns) == ends_ns.maxlen:
                usual_ns = _typical_ns(ends_ns)
            if steps >= FEWEST_STEPS_BETWEEN and steps % LOOK_EVERY == 0:
                changed = abs(_typical_ns(ends_ns) / usual_ns - 1) > _IS_ANOTHER
                with self._launches():
                    (is_another,) = agree_on_numbers([changed], self._group, self._group_device)
            if not is_another:
                yield None

    # -- small parts ---------------------------------------------------------------------------------------------

    def _measured(self, plan: BucketPlan) -> PlanChange:
        """The next step is measured, with this plan."""
        assert self._measuring is not None
        self._measuring.step_begins()
        return PlanChange(plan=plan, reason="probe")

    def _end_measuring(self) -> None:
        if self._measuring is not None:
            self._measuring.end()
            self._measuring = None

    def _decide(
        self,
        candidates: Sequence[Candidate],
        measured_ns: Float64Array,
        chosen: int,
        measured_steps: int,
        why_not: str,
    ) -> None:
        if self._group.rank() == 0:
            trials = trials_of(candidates, measured_ns)
            decision = Decision(
                after_reductions=self._reductions,
                step=self._recorder.step if self._recorder is not None else None,
                measured_steps=measured_steps,
                trials=trials,
                chosen=chosen,
                why=f"the buckets stay: {why_not}" if why_not else reason_for(trials, chosen),
            )
            self.decisions.append(decision)
            _log.info("after %d steps, %s", self._reductions, decision.why)
        self._say("decided")

    def _say(self, state: str, **more: Any) -> None:
        if self._recorder is not None:
            decisions = [asdict(decision) for decision in self.decisions]
            self._recorder.choosing_is(self._model, {"state": state, "decisions": decisions, **more})

    @property
    def _group_device(self) -> torch.device:
        return self._reducer.plan.parameters[0].device

    def _launches(self) -> AbstractContextManager[None]:
        return launched_for(Purpose(role="plan", model=self._model))


def _typical_ns(ends_ns: Sequence[int]) -> float:
    return float(np.median(np.diff(ends_ns)))
