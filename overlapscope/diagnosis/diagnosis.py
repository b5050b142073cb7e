"""Diagnosis of a recording or of Flight Recorder dumps: the verdict, and the order of collectives behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from overlapscope.diagnosis.collective_order import OrderSource
from overlapscope.diagnosis.evidence import Evidence, GroupOrder
from overlapscope.diagnosis.flight_recorder import FlightRecorderDumps, read_dumps
from overlapscope.diagnosis.from_recording import read_order_and_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.order_view import OrderLanes
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import Problem
from overlapscope.trace.collective_log import ProcessGroup
from overlapscope.trace.folders import find_rank_folders, has_collective_logs
from overlapscope.trace.process_files import WatchdogReport, read_reports


class Diagnosis:
    """A verdict and the data it is based on.

    Args:
        problems: problems with the files that were read.
        offsets_ns: added to the times of each rank to make them comparable; ranks with unknown clocks have none.
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

    @classmethod
    def of(cls, path: Path, offsets_ns: Mapping[int, float] | None = None) -> Diagnosis | None:
        """Diagnose a recording; None if it holds no collective logs, not even damaged ones.

        Args:
            path: folder of the recording.
            offsets_ns: see the class.
        """
        folders = find_rank_folders(path)
        if not any(map(has_collective_logs, folders.values())):
            return None
        source, evidence, problems = read_order_and_evidence(path)
        if not source.groups() and not source.logs.problems:  # they have just been made
            return None
        return cls(source, evidence, problems, read_reports(folders), offsets_ns)

    @classmethod
    def of_dumps(cls, path: Path) -> Diagnosis:
        """Diagnose dumps of PyTorch's Flight Recorder.

        Raises:
            OverlapScopeError: no dump can be read.
        """
        source, _ = FlightRecorderDumps.read(path)
        return cls(source, *read_dumps(path))

    @property
    def is_incident(self) -> bool:
        """Return True if the diagnosis should be shown first."""
        return self.verdict.is_fault or any(report.retracted_ns is None for report in self.reports)

    def highlight(self, group: ProcessGroup) -> tuple[int, str] | None:
        """Return the number at which the fault began in a group, and a label; None if nothing began in this group."""
        order = self._order(group)
        if order.first_divergence is not None:
            return order.first_divergence, "differs since before" if order.predates_log else "first difference"
        if self.verdict.is_fault and self.verdict.number is not None and self.verdict.group == group.name:
            return self.verdict.number, "stopped here"
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
            blamed=self.verdict.named,
        )
