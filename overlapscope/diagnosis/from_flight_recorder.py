"""Evidence from dumps of PyTorch's Flight Recorder, so that the rules for recordings apply to them.

A dump has no step, bucket, parameter, phase or process state, and no time of its own: the dumps of one job are assumed
to be from one moment. The process was alive then, because it wrote the dump itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.difference import Difference
from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Entry, Evidence, Gap, GroupOrder, RankEvidence, Standing
from overlapscope.diagnosis.flight_recorder_dumps import FlightRecorderDumps
from overlapscope.diagnosis.order import conversations_of, group_order
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
    gaps = tuple(Gap(str(problem), _DUMP_AGAIN) for problem in problems if problem.severity == "error")
    evidence = replace(evidence_of(source), gaps=gaps)
    return evidence, [Problem("note", f"{path}: {_LIMITS}"), *_forgotten(path, source), *problems]


def evidence_of(source: FlightRecorderDumps) -> Evidence:
    """Return the evidence that dumps hold about each rank and each group."""
    groups = [group for group in source.groups() if not group.is_point_to_point]
    newest = {rank: _newest_entry(source, rank) for rank in source.dumps}
    return Evidence(
        expected_ranks=source.expected_ranks,
        ranks={
            rank: RankEvidence(
                rank=rank,
                liveness="dumped",
                standing=_standing(newest[rank]),
                idle_ns=_idle_ns(dump, newest[rank]),
            )
            for rank, dump in sorted(source.dumps.items())
        },
        groups=tuple(_order(source, group) for group in groups),
        conversations=conversations_of(source),
    )


def first_difference(source: OrderSource, group: ProcessGroup) -> int | None:
    """Return the first number at which ranks launched different collectives, among entries that several still have."""
    signatures: dict[int, int] = {}
    differs: set[int] = set()
    for rank in source.recorded(group):
        for entry in source.entries(group, rank, source.oldest(group, rank), source.newest(group, rank)):
            if signatures.setdefault(entry.number, entry.signature.hash) != entry.signature.hash:
                differs.add(entry.number)
    return min(differs, default=None)


def _forgotten(path: Path, source: FlightRecorderDumps) -> list[Problem]:
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
    number = first_difference(source, group)
    if number is None:
        return group_order(source, group, None)
    # A difference in the oldest entries that can be compared has probably begun before them.
    oldest = sorted(source.oldest(group, rank) for rank in source.recorded(group))
    is_since_before = 1 < number <= oldest[1]
    return group_order(
        source, group, Difference(number=number, divergence="signature", is_since_before=is_since_before)
    )


def _newest_entry(source: FlightRecorderDumps, rank: int) -> Entry | None:
    newest = [
        entry
        for group in source.groups()
        for entry in source.entries(group, rank, source.newest(group, rank), source.newest(group, rank))
    ]
    return max(newest, key=lambda entry: entry.announced_ns, default=None)


def _standing(newest: Entry | None) -> Standing:
    if newest is None:
        return Standing(step=UNKNOWN_STEP)
    return Standing(step=UNKNOWN_STEP, call_site=newest.call_site, since_ns=newest.announced_ns)


def _idle_ns(dump: Dump, newest: Entry | None) -> int | None:
    """Return the age of the latest collective, if the dump was written so soon after it that nothing is wrong.

    A copied file may have any later modification time, so a long time is no sign of a stall.
    """
    if newest is None:
        return None
    idle_ns = dump.written_ns - newest.announced_ns
    return idle_ns if 0 <= idle_ns < STUCK_AFTER_NS else None
