"""What is wrong with a recording, and the order of collectives that it is told from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.evidence import Evidence, GroupOrder
from overlapscope.diagnosis.flight_recorder_dumps import FlightRecorderDumps
from overlapscope.diagnosis.from_flight_recorder import read_dumps
from overlapscope.diagnosis.from_logs import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.order_lanes import OrderLanes
from overlapscope.diagnosis.order_source import OrderSource, ProcessGroup
from overlapscope.diagnosis.recorded_order import RecordedOrder
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.group_reader import read_collective_logs
from overlapscope.trace.log import Problem
from overlapscope.trace.reader import Trace
from overlapscope.trace.reports import WatchdogReport, read_reports

_OUTDATED_AFTER_S: Final = 2.0


class Diagnosis:
    """A verdict with what it rests on.

    Args:
        problems: with the files that it rests on.
        offsets_ns: what to add to the times of each rank to compare them; ranks whose clocks are not known have none.
    """

    def __init__(
        self,
        source: OrderSource,
        evidence: Evidence,
        problems: Sequence[Problem] = (),
        reports: Sequence[WatchdogReport] = (),
        offsets_ns: Mapping[int, float] | None = None,
    ) -> None:
        self.source = source
        self.evidence = evidence
        self.verdict: Verdict = judge(evidence)
        self.problems = tuple(problems)
        self.reports = tuple(reports)
        self.offsets_ns = offsets_ns or {}
        self.groups = tuple(group for group in source.groups() if not group.is_point_to_point)
        self._orders = {(order.name, order.ranks): order for order in evidence.groups}
        self.lanes = cache(self._lanes)
        self._made = time.monotonic()

    @classmethod
    def of(cls, trace: Trace) -> Diagnosis | None:
        """What is wrong with a recording; None if it holds no collective logs."""
        folders = find_rank_folders(trace.path)
        source = RecordedOrder(read_collective_logs(folders))
        if not source.groups():
            return None
        evidence, problems = read_evidence(trace.path)
        return cls(source, evidence, problems, read_reports(folders), clock_offsets(trace))

    @classmethod
    def of_dumps(cls, path: Path) -> Diagnosis:
        """What dumps of PyTorch's Flight Recorder say.

        Raises:
            OverlapScopeError: none of them can be read.
        """
        source, _ = FlightRecorderDumps.read(path)
        return cls(source, *read_dumps(path))

    @property
    def is_incident(self) -> bool:
        """Whether the page of it is what people want to see first."""
        return self.verdict.is_fault or any(report.retracted_ns is None for report in self.reports)

    @property
    def is_outdated(self) -> bool:
        """Whether it is of a job that runs, and was told a while ago: a job hangs although its files stay the same."""
        return self.evidence.is_live and time.monotonic() - self._made > _OUTDATED_AFTER_S

    def highlight(self, group: ProcessGroup) -> tuple[int, str] | None:
        """The number in a group at which it began, and what to call that; None if nothing began in this group."""
        order = self._order(group)
        if order.first_divergence is not None:
            return order.first_divergence, "differs since before" if order.is_since_before else "first difference"
        if self.verdict.is_fault and self.verdict.number is not None and self.verdict.group == group.name:
            return self.verdict.number, "here it stopped"
        return None

    def _order(self, group: ProcessGroup) -> GroupOrder:
        return self._orders.get((group.name, group.ranks)) or GroupOrder(name=group.name, ranks=group.ranks)

    def _lanes(self, group: ProcessGroup) -> OrderLanes:
        order = self._order(group)
        return OrderLanes(
            self.source,
            group,
            first_divergence=order.first_divergence,
            divergence=order.divergence,
            blamed=self.verdict.blamed,
        )


def clock_offsets(trace: Trace) -> dict[int, float]:
    """What to add to the times of each rank to compare them, of the ranks whose clocks can be."""
    known = trace.ranks[trace.ranks["clock"] != "none"]
    return dict(zip(known["rank"].tolist(), known["offset_ns"].astype(float).tolist(), strict=True))
