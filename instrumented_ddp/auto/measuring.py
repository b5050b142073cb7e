"""Measuring some steps: with what the recorder writes anyway, or else with a meter."""

from __future__ import annotations

import torch

from instrumented_ddp.auto.cycles import Cycles, cycles_of
from instrumented_ddp.auto.meter import Meter
from instrumented_ddp.recorder import Recorder
from instrumented_ddp.reducer import Reducer
from overlapscope.trace.log import Records, newest_records


class Measuring:
    """Of one model, from now until ``end``. Begun and ended between two steps.

    Args:
        reducer: of the model. The next thing it is told must be a plan.
        model: its number.
        device: where it computes.
    """

    def __init__(self, reducer: Reducer, recorder: Recorder | None, model: int, device: torch.device) -> None:
        self._reducer = reducer
        self._recorder = recorder
        self._model = model
        self._steps: list[int] = []
        self._records_before = recorder.log.newest if recorder is not None else 0
        self._meter = Meter(device) if recorder is None else None
        if self._meter is not None:
            reducer.observe_by(self._meter)

    def step_begins(self) -> None:
        """A step begins that is to be measured."""
        observer = self._reducer.observer
        assert observer is not None
        self._steps.append(observer.step)

    def cycles(self, newest: int | None = None) -> Cycles:
        """Of the steps so far, but the first; nobody saw the one before that end.

        Args:
            newest: of so many steps; of all if not given.
        """
        steps = self._steps if newest is None else self._steps[-newest - 1 :]
        plans = [plan.buckets for plan in self._reducer.plans]
        return cycles_of(self._records(), self._model, plans, steps, len(self._reducer.plan.parameters))

    def end(self) -> None:
        """Measure no more."""
        if self._meter is not None:
            self._reducer.observe_by(None)
            self._meter.close()

    def _records(self) -> Records:
        if self._recorder is None:
            assert self._meter is not None
            return self._meter.records()
        log = self._recorder.log
        return newest_records(log.path, log.newest - self._records_before)
