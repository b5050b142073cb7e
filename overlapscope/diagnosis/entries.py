"""From the fields of an entry in a collective log to what the rules know of a collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.trace.format import Phase
from overlapscope.trace.group_log import UNEVEN_INPUTS, UNKNOWN
from overlapscope.trace.signature import Signature

UNKNOWN_SIGNATURE: Final = Signature(op="unknown")
"""Of an entry whose line in ``signatures.jsonl`` is lost."""

_PHASES: Final = {phase.value: phase.name.lower() for phase in Phase} | {Phase.DATA_WAIT.value: "loop"}
"""In version 0.1 all of the loop's own code was a wait for data."""


def entries_of(
    rows: Iterable[Sequence[int]], signatures: Mapping[int, Signature], call_sites: Mapping[int, CallSite]
) -> tuple[Entry, ...]:
    """Decode entries, of a log that is being written or of a file.

    Args:
        rows: fields as in ``group_log.ENTRY_FIELDS``.
        signatures: by number, those of this rank.
        call_sites: likewise.
    """
    return tuple(
        Entry(
            number=number,
            signature=signatures.get(signature, UNKNOWN_SIGNATURE),
            step=step,
            # Inside join() ranks may be anywhere in their data, and who has joined is at no batch at all.
            batch=None if batch == UNKNOWN or flags & UNEVEN_INPUTS else batch,
            phase=phase_name(phase),
            call_site=call_sites.get(call_site),
            flags=flags,
            announced_ns=announced_ns,
            launched_ns=launched_ns or None,
            completed_ns=completed_ns or None,
        )
        for (
            number,
            signature,
            call_site,
            step,
            batch,
            phase,
            flags,
            _,
            _,
            _,
            announced_ns,
            launched_ns,
            completed_ns,
        ) in rows
    )


def phase_name(phase: int) -> str | None:
    """What a phase is called in evidence; None outside a training step, and of a number that means nothing."""
    return _PHASES.get(phase)
