"""What the machine said in a recording: about late ranks, in all, and step by step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.machine.conditions import KINDS, Condition, ConditionKind, measure_conditions
from overlapscope.machine.evidence import MachineEvidence, contrast
from overlapscope.machine.readings import MachineReadings, Spans, spans_of
from overlapscope.trace.machine_facts import source_kind
from overlapscope.trace.machine_log import MachineReading, MachineSource
from overlapscope.trace.recording import Trace


def collect_readings(trace: Trace) -> MachineReadings:
    """Return what the ranks of a recording have sampled."""
    rows = trace.machine[list(MachineReading._fields)].itertuples(index=False, name=None)
    sources: dict[int, list[MachineSource]] = {}
    for rank, *source in trace.machine_sources.itertuples(index=False, name=None):
        sources.setdefault(rank, []).append(MachineSource(*source))
    return MachineReadings((MachineReading(*row) for row in rows), sources)


def find_spans(steps: pd.DataFrame, wanted: npt.NDArray[np.int64]) -> Spans:
    """Return the time of each of some steps, from when the first rank began it to when the last one ended it."""
    times = steps[steps["step"].isin(wanted)].groupby("step").agg({"start_ns": "min", "end_ns": "max"})
    found: Spans = times.to_numpy(np.int64).T.copy()
    return found


def contrast_late_ranks(
    trace: Trace, readings: MachineReadings, ranks: Collection[int], steps: npt.NDArray[np.int64]
) -> tuple[MachineEvidence, ...]:
    """Compare what the machine said of ranks in the steps in which they were late with the other ranks and steps.

    Args:
        readings: from ``collect_readings``.
    """
    if not readings.sources or not len(steps):
        return ()
    return contrast(measure_conditions(readings, find_spans(trace.steps, steps)), readings.uses, ranks)


@dataclass(frozen=True, kw_only=True)
class RankCondition:
    """A condition in the whole recording, and the ranks that it concerns."""

    ranks: tuple[int, ...]
    condition: Condition


class MachineSummary:
    """What the machine said in a whole recording."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.readings: MachineReadings = collect_readings(trace)

    @cached_property
    def conditions(self) -> tuple[RankCondition, ...]:
        """Return the conditions that are worth a word, the most telling kind first, and of each the worst first."""
        steps = self._trace.steps
        if not len(steps):
            return ()
        spans = spans_of((int(steps["start_ns"].min()), int(steps["end_ns"].max())))
        found = [
            RankCondition(ranks=self._ranks_of(condition.source), condition=condition)
            for conditions in measure_conditions(self.readings, spans).values()
            for condition in conditions
        ]
        order = {kind.name: number for number, kind in enumerate(KINDS)}
        least = {kind.name: kind.least for kind in KINDS}
        return tuple(
            sorted(
                (one for one in found if one.condition.amount >= least[one.condition.kind]),
                key=lambda one: (order[one.condition.kind], -one.condition.amount, one.ranks),
            )
        )

    def _ranks_of(self, source: str) -> tuple[int, ...]:
        return tuple(rank for rank, sources in self.readings.uses.items() if source in sources)

    def tabulate_steps(self, kind: ConditionKind) -> pd.DataFrame:
        """Return the share of a condition in each step of each rank that uses such a source.

        Returns:
            rank, step, share (missing where the source was not sampled).
        """
        parts = []
        for rank, sources in self.readings.uses.items():
            steps = self._trace.steps[self._trace.steps["rank"] == rank]
            for name in sources:
                source = self.readings.sources.get(name)
                if source is None or source_kind(name) != kind.source:
                    continue
                spans: Spans = steps[["start_ns", "end_ns"]].to_numpy(np.int64).T
                parts.append(steps[["rank", "step"]].assign(share=kind.measure_each(source, spans)))
        nothing = pd.DataFrame({"rank": pd.Series(dtype="int64"), "step": pd.Series(dtype="int64")})
        return pd.concat(parts, ignore_index=True) if parts else nothing.assign(share=pd.Series(dtype="float64"))
