"""Evidence from dumps of PyTorch's Flight Recorder, so that the rules for recordings apply to them.

A dump has no step, bucket, parameter, phase or process state, and no time of its own: the dumps of one job are assumed
to be from one moment. The process was alive then, because it wrote the dump itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.difference import EntryDifference
from overlapscope.diagnosis.evidence import (
    UNKNOWN_STEP,
    Entry,
    Evidence,
    GroupOrder,
    RankEvidence,
    RankPosition,
    RecordingGap,
)
from overlapscope.diagnosis.flight_recorder_dumps import FlightRecorderDumps
from overlapscope.diagnosis.order import make_group_order, read_point_to_point_orders
from overlapscope.diagnosis.order_source import OrderSource, ProcessGroup
from overlapscope.diagnosis.patience import STUCK_AFTER_NS
from overlapscope.trace.flight_recorder import Dump
from overlapscope.trace.log import Problem

_LIMITS: Final = (
    "Flight Recorder dumps don't hold steps, buckets, parameters or their own time; all are assumed to be from "
    "one moment"
)
_DUMP_AGAIN: Final = "Copy this dump again from where it was made, or dump again."


def read_dumps(path: Path) -> tuple[Evidence, list[Problem]]:
    """Read one dump, or a folder of them, for ``judge``.

    Returns:
        The evidence about each rank and group, and problems with the files or limits of what they show.

    Raises:
        OverlapScopeError: no dump can be read.
    """
    source, problems = FlightRecorderDumps.read(path)
    gaps = tuple(RecordingGap(str(problem), _DUMP_AGAIN) for problem in problems if problem.severity == "error")
    evidence = replace(evidence_from_dumps(source), gaps=gaps)
    return evidence, [Problem("note", f"{path}: {_LIMITS}"), *_overwritten_notes(path, source), *problems]


def evidence_from_dumps(source: FlightRecorderDumps) -> Evidence:
    """Return the evidence that dumps hold about each rank and each group."""
    groups = [group for group in source.groups() if not group.is_point_to_point]
    latest = {rank: _newest_entry(source, rank) for rank in source.dumps}
    return Evidence(
        expected_ranks=source.expected_ranks,
        ranks={
            rank: RankEvidence(
                rank=rank,
                liveness="dumped",
                position=_last_position(latest[rank]),
                idle_ns=_idle_ns(dump, latest[rank]),
            )
            for rank, dump in sorted(source.dumps.items())
        },
        groups=tuple(_order(source, group) for group in groups),
        point_to_point_orders=read_point_to_point_orders(source),
    )


def find_signature_difference(source: OrderSource, group: ProcessGroup) -> int | None:
    """Return the first number at which ranks launched different collectives, among entries that several still have."""
    signatures: dict[int, int] = {}
    differs: set[int] = set()
    for rank in source.recorded(group):
        for entry in source.entries(group, rank, source.oldest(group, rank), source.latest(group, rank)):
            if signatures.setdefault(entry.number, entry.signature.hash) != entry.signature.hash:
                differs.add(entry.number)
    return min(differs, default=None)


def _overwritten_notes(path: Path, source: FlightRecorderDumps) -> list[Problem]:
    oldest = {
        group: max(source.oldest(group, rank) for rank in source.recorded(group))
        for group in source.groups()
        if not group.is_point_to_point
    }
    return [
        Problem("note", f"{path}: {group.title}: only collectives from {number} on are in all dumps")
        for group, number in oldest.items()
        if number > 1
    ]


def _order(source: OrderSource, group: ProcessGroup) -> GroupOrder:
    number = find_signature_difference(source, group)
    if number is None:
        return make_group_order(source, group, None)
    # A difference in the oldest entries that can be compared has probably begun before them.
    oldest = sorted(source.oldest(group, rank) for rank in source.recorded(group))
    predates_log = 1 < number <= oldest[1]
    return make_group_order(
        source, group, EntryDifference(number=number, divergence="signature", predates_log=predates_log)
    )


def _newest_entry(source: FlightRecorderDumps, rank: int) -> Entry | None:
    latest = [
        entry
        for group in source.groups()
        for entry in source.entries(group, rank, source.latest(group, rank), source.latest(group, rank))
    ]
    return max(latest, key=lambda entry: entry.announced_ns, default=None)


def _last_position(latest: Entry | None) -> RankPosition:
    if latest is None:
        return RankPosition(step=UNKNOWN_STEP)
    return RankPosition(step=UNKNOWN_STEP, call_site=latest.call_site, since_ns=latest.announced_ns)


def _idle_ns(dump: Dump, latest: Entry | None) -> int | None:
    """Return the age of the latest collective, if the dump was written so soon after it that nothing is wrong.

    A copied file may have any later modification time, so a long time is no sign of a stall.
    """
    if latest is None:
        return None
    idle_ns = dump.written_ns - latest.announced_ns
    return idle_ns if 0 <= idle_ns < STUCK_AFTER_NS else None
