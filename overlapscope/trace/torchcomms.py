"""Conversion of torchcomms' Flight Recorder dumps, which have PyTorch's layout but different sequence numbers.

Based on ``comms/torchcomms/hooks/fr/FlightRecorder.cpp`` of meta-pytorch/torchcomms. ``collective_seq_id`` counts what
the process has launched in all communicators together, from 0. This includes sends and receives, which are not marked
as such and have no peer. A group's description is the backend's name. ``completed`` is rarely seen, as on gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.flight_recorder import Dump, DumpEntry

_POINT_TO_POINT: Final = ("send", "recv", "batch_op_issue")


def renumber_by_group(dump: Dump) -> Dump:
    """Renumber collectives of a torchcomms dump within their groups, as in dumps of PyTorch; return others unchanged.

    Raises:
        OverlapScopeError: the numbers are unknown, because some launches are missing from the dump.
    """
    if not _is_of_torchcomms(dump.entries):
        return dump
    collectives = [entry for entry in dump.entries if _op(entry) not in _POINT_TO_POINT]
    # Missing entries may be of any communicator, or sent to a single rank.
    if any(entry.number != index for index, entry in enumerate(dump.entries)):
        raise OverlapScopeError(
            f"{dump.path}: torchcomms numbers what is launched in all communicators together, and not all of it is in "
            "this dump: it can't be compared with others; give FlightRecorderHook more max_entries, and dump it with "
            "include_completed=True"
        )
    counted: Counter[str] = Counter()
    numbered = []
    for entry in collectives:
        counted[entry.group] += 1
        numbered.append(replace(entry, number=counted[entry.group]))
    return replace(
        dump, entries=tuple(numbered), is_from_torchcomms=True, left_out=len(dump.entries) - len(collectives)
    )


def _is_of_torchcomms(entries: Sequence[DumpEntry]) -> bool:
    return bool(entries) and all(entry.description == entry.name.partition(":")[0] != "" for entry in entries)


def _op(entry: DumpEntry) -> str:
    return entry.name.partition(":")[2]
