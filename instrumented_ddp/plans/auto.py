"""``bucket_cap_mb="auto"`` as a ``PlanSchedule``: what is done in each step.

After some warm-up steps come 24 steps with several plans, which are measured. Rank 0 predicts from them what every
other plan would take; the best few then train in blocks of steps, again measured, and the fastest is kept. From then
on only step times are measured, on rank 0. If they have changed a lot 500 steps later or at any time after that,
because the network or the load has changed, it starts again.

All ranks launch the same collectives at the same steps, whatever goes wrong on one of them: local computations between
two of them may fail (``_run_locally``), and then the rank contributes no measurement, or no proposal.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collectives.backends import get_backend_name
from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from instrumented_ddp.plans.auto_choice import (
    Candidate,
    Decision,
    describe_choice,
    fastest,
    propose_candidates,
    step_times_ns,
    trial_blocks,
    trials_of,
)
from instrumented_ddp.plans.auto_measuring import Measurement, gather_cycles
from instrumented_ddp.plans.probing import ProbedSchedule, ProbedSteps, gradients_of
from instrumented_ddp.plans.schedule import PlanChange
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.reduction.agreement import agree_on_numbers, agree_on_plan
from instrumented_ddp.reduction.reducer import Reducer
from overlapscope.bucket_model.observation import BucketCycles, observations_from_cycles
from overlapscope.bucket_model.partition import Float64Array, Int64Array
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.schema import count_lanes

MIN_STEPS_BETWEEN_DECISIONS: Final = 500
"""Minimum number of steps between two decisions."""
CHECK_EVERY_STEPS: Final = 100
"""Number of steps after which rank 0 broadcasts whether step times have changed."""
_MIN_CYCLES: Final = 6
"""Number of measured steps that must have been seen whole on all ranks."""
_WINDOW_STEPS: Final = 20
"""Number of steps whose median is the current step time."""
_CHANGE_THRESHOLD: Final = 0.1
"""Relative change of the step time that is worth another decision."""

_Result = TypeVar("_Result")

_log = logging.getLogger("instrumented_ddp")


class AutoBuckets(ProbedSchedule):
    """Automatic tuning of one model's buckets.

    Args:
        reducer: the reducer whose plans change.
        recorder: recorder of the process, if it records.
        model: number of the model in the recording.
        device: device where the model computes.
    """

    def __init__(self, reducer: Reducer, recorder: Recorder | None, model: int, device: torch.device) -> None:
        super().__init__(recorder, model, "auto")
        self._reducer = reducer
        self._device = device
        self._measuring: Measurement | None = None
        self.decisions: list[Decision] = []
        """Decisions so far, on rank 0."""
        self._note_state("waiting")

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, all_ranks_agree: bool
    ) -> None:
        """Agree on the first measurement, and end that of a previous group; see ``ProbedSchedule.agree``."""
        self._end_measuring()
        super().agree(own, order, group, after=after, all_ranks_agree=all_ranks_agree)

    def change_after(self, reductions: int) -> PlanChange | None:
        """Return the plan to adopt now; see ``ProbedSchedule.change_after``."""
        change = super().change_after(reductions)
        if self.is_over:
            self._end_measuring()
        return change

    # -- steps ---------------------------------------------------------------------------------------------------

    def _run(self, own: BucketPlan, after: int) -> Iterator[PlanChange | None]:
        while True:
            self._note_state("waiting")
            yield from self._warm_up(after)
            self._before = own
            self._measuring = self._run_locally("measuring steps", self._begin_measuring, None)
            yield from self._measured(self._probed, "measuring")
            candidates, measured_steps, why_not = self._candidates(own)
            plans = self._on_all_ranks(candidates, own)
            chosen, measured_ns = 0, np.full(len(plans), np.nan)
            if len(plans) > 1:
                chosen, measured_ns = yield from self._try_in_blocks(plans)
            self._end_measuring()
            self._before = None
            if self._group.rank() == 0:
                decide = partial(self._decide, candidates, measured_ns, chosen, measured_steps, why_not)
                self._run_locally("recording the decision", decide, None)
            self._note_state("decided")
            own = plans[chosen]
            yield PlanChange(plan=own, reason="auto" if chosen else "return")
            yield from self._wait_for_changed_times(float(measured_ns[chosen]))
            after = self._reductions

    def _candidates(self, before: BucketPlan) -> tuple[list[Candidate], int, str]:
        """Return rank 0's candidates, the number of steps they are based on, and the reason if it has none.

        Called on all ranks.
        """
        own = self._cycles(self._probed)
        with self._launches():
            cycles, ranks = gather_cycles(own, self._group, self._group_device)
        if self._group.rank() != 0:
            return [_active_candidate(before)], 0, ""
        predict = partial(self._predict, cycles, ranks, before)
        return self._run_locally(
            "predicting step times", predict, ([_active_candidate(before)], 0, "predicting step times failed")
        )

    def _predict(self, cycles: BucketCycles, ranks: Int64Array, before: BucketPlan) -> tuple[list[Candidate], int, str]:
        """Return the same as ``_candidates``, from the cycles of all ranks."""
        whole = cycles.of(cycles.is_complete)
        count = len(whole.epoch)
        if count < _MIN_CYCLES:
            return (
                [_active_candidate(before)],
                count,
                f"only {count} of the measured steps reduced every bucket once on all ranks",
            )
        plans = {epoch: plan.buckets for epoch, plan in enumerate(self._reducer.plans)}
        observations = observations_from_cycles(
            whole, ranks, plans, gradients_of(before, self._order), self._group.size()
        )
        backend = get_backend_name(self._group, before.parameters[0].device)
        return propose_candidates(observations, before.buckets, lanes=count_lanes(backend)), count, ""

    def _on_all_ranks(self, candidates: Sequence[Candidate], before: BucketPlan) -> list[BucketPlan]:
        """Broadcast rank 0's candidates to all ranks as plans."""
        with self._launches():
            (count,) = agree_on_numbers([len(candidates)], self._group, self._group_device)
            plans = [BucketPlan(before.parameters, each.buckets) for each in candidates]
            plans = plans if self._group.rank() == 0 else [before] * count
            return [before, *(agree_on_plan(plan, self._group, self._group_device) for plan in plans[1:])]

    def _try_in_blocks(self, plans: Sequence[BucketPlan]) -> Generator[PlanChange, None, tuple[int, Float64Array]]:
        """Run with each plan for some steps. Return the fastest, and the step times as this rank saw them."""
        blocks = trial_blocks(len(plans))
        steps = ProbedSteps(plans=plans, plan_of_step=blocks.tolist())
        yield from self._measured(steps, "trying")
        length_ns = self._cycles(steps).length_ns
        unknown_ns = np.full(len(plans), np.nan)
        measured_ns = self._run_locally(
            "timing steps", lambda: step_times_ns(length_ns, blocks, len(plans)), unknown_ns
        )
        fastest_here = self._run_locally("choosing the fastest plan", lambda: fastest(measured_ns), 0)
        with self._launches():
            (chosen,) = agree_on_numbers([fastest_here], self._group, self._group_device)
        return chosen, measured_ns

    def _wait_for_changed_times(self, usual_ns: float) -> Iterator[None]:
        """Keep the plan until step times differ from when it was chosen.

        Args:
            usual_ns: step time then; if it is NaN, as nothing was tried, that of the first steps is used.
        """
        ends_ns: deque[int] = deque(maxlen=_WINDOW_STEPS + 1)
        steps, has_changed = 0, 0
        while not has_changed:
            steps += 1
            ends_ns.append(host_now_ns())
            if steps == _WINDOW_STEPS + 1 and np.isnan(usual_ns):
                usual_ns = self._run_locally("timing steps", lambda: _typical_ns(ends_ns), usual_ns)
            if steps >= MIN_STEPS_BETWEEN_DECISIONS and steps % CHECK_EVERY_STEPS == 0:
                changed = self._run_locally("timing steps", partial(_has_changed, ends_ns, usual_ns), False)
                with self._launches():
                    (has_changed,) = agree_on_numbers([changed], self._group, self._group_device)
            if not has_changed:
                yield None

    # -- helpers -------------------------------------------------------------------------------------------------

    def _begin_measuring(self) -> Measurement:
        return Measurement(self._reducer, self._recorder, self._model, self._device)

    def _measured(self, steps: ProbedSteps, state: str) -> Iterator[PlanChange]:
        """Run these steps, and measure them."""
        self._note_state(state)
        for change in steps.changes():
            if self._measuring is not None and not self._run_locally(
                "measuring steps", self._measuring.on_step_start, False
            ):
                self._end_measuring()
            yield change

    def _cycles(self, steps: ProbedSteps) -> BucketCycles:
        """Return the cycles of this rank in the latest steps; of the same shape on all ranks."""
        plans, step_count = steps.plans, len(steps.plan_of_step)
        shape = step_count, len(plans[0].parameters), max(len(plan.buckets) for plan in plans)
        without_observations = BucketCycles.without_observations(range(step_count), *shape[1:])

        def measured() -> BucketCycles:
            cycles = self._measuring.cycles(plans, step_count) if self._measuring is not None else without_observations
            if cycles.shape != shape:
                raise ValueError(f"cycles of shape {cycles.shape} instead of {shape}")
            return cycles

        return self._run_locally("measuring steps", measured, without_observations)

    def _end_measuring(self) -> None:
        if self._measuring is not None:
            self._run_locally("ending the measurement", self._measuring.end, None)
            self._measuring = None

    def _decide(
        self,
        candidates: Sequence[Candidate],
        measured_ns: Float64Array,
        chosen: int,
        measured_steps: int,
        why_not: str,
    ) -> None:
        trials = trials_of(candidates, measured_ns)
        decision = Decision(
            after_reductions=self._reductions,
            step=self._recorder.steps.step if self._recorder is not None else None,
            measured_steps=measured_steps,
            trials=trials,
            chosen=chosen,
            why=f"the buckets stay: {why_not}" if why_not else describe_choice(trials, chosen),
        )
        self.decisions.append(decision)
        _log.info("after %d steps, %s", self._reductions, decision.why)

    def _note_state(self, state: str, **more: Any) -> None:
        decisions = [asdict(decision) for decision in self.decisions]
        note = partial(super()._note_state, state, decisions=decisions, **more)
        self._run_locally("recording its progress", note, None)

    def _run_locally(self, what: str, compute: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Compute something on this rank only; on failure return ``otherwise``, to keep up with the other ranks."""
        try:
            return compute()
        except Exception as error:  # the training continues without it
            _log.warning("bucket_cap_mb='auto': %s failed (%s: %s)", what, type(error).__name__, error)
            _log.debug("The traceback of this:", exc_info=True)
            return otherwise

    @property
    def _group_device(self) -> torch.device:
        return self._reducer.plan.parameters[0].device

    def _launches(self) -> AbstractContextManager[None]:
        return collective_context(CollectiveRole(role="plan", model=self._model))


def _active_candidate(plan: BucketPlan) -> Candidate:
    """Return the active plan as a candidate without predictions."""
    return Candidate(buckets=plan.buckets, setting="the plan in force", predicted_ns=float("nan"))


def _has_changed(ends_ns: Sequence[int], usual_ns: float) -> bool:
    return abs(_typical_ns(ends_ns) / usual_ns - 1) > _CHANGE_THRESHOLD


def _typical_ns(ends_ns: Sequence[int]) -> float:
    return float(np.median(np.diff(ends_ns)))
