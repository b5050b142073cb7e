"""Measurement of some steps, from what the recorder writes anyway, or else with a meter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.plans.auto.meter import Meter
from instrumented_ddp.recording.model_events import ModelEvents
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.reduction.reducer import Reducer
from overlapscope.model.bucket_cycles import BucketCycles, compute_bucket_cycles
from overlapscope.trace.log import Records, read_latest_records


class Measurement:
    """A measurement of one model, from now until ``end``. Begun and ended between two steps.

    Args:
        reducer: reducer of the model. A plan must be adopted next.
        model: number of the model.
        device: device where it computes.
    """

    def __init__(self, reducer: Reducer, recorder: Recorder | None, model: int, device: torch.device) -> None:
        self._reducer = reducer
        self._recorder = recorder
        self._model = model
        self._steps: list[int] = []
        self._records_before = recorder.log.latest if recorder is not None else 0
        self._meter = Meter(device) if recorder is None else None
        if self._meter is not None:
            self._events_before = reducer.events
            stats, parameters = reducer.events.stats, len(reducer.parameters)
            reducer.set_listener(ModelEvents(self._meter, model, device, stats, parameters))

    def on_step_start(self) -> bool:
        """Note that a step begins that is to be measured. Return True."""
        observer = self._reducer.events.observer
        assert observer is not None
        self._steps.append(observer.step)
        return True

    def cycles(self, plans: Sequence[BucketPlan], latest: int) -> BucketCycles:
        """Return the cycles of the latest steps. For the very first step, the end of the previous one is unknown.

        Args:
            plans: the plans that the steps ran with.
            newest: number of steps.
        """
        wanted = {plan.buckets for plan in plans}
        active = {number: plan.buckets for number, plan in enumerate(self._reducer.plans) if plan.buckets in wanted}
        steps = self._steps[-latest:]
        return compute_bucket_cycles(self._records(), self._model, active, steps, len(self._reducer.plan.parameters))

    def end(self) -> None:
        """Stop measuring."""
        if self._meter is not None:
            self._reducer.set_listener(self._events_before)
            self._meter.close()

    def _records(self) -> Records:
        if self._recorder is None:
            assert self._meter is not None
            return self._meter.records()
        log = self._recorder.log
        return read_latest_records(log.path, log.latest - self._records_before)
