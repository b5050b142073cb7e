"""Decoder from rows of a collective log to ``Entry`` objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.trace.format import Phase
from overlapscope.trace.group_log import UNEVEN_INPUTS, UNKNOWN
from overlapscope.trace.signature import Signature

UNKNOWN_SIGNATURE: Final = Signature(op="unknown")
"""Signature of an entry whose line in ``signatures.jsonl`` is lost."""

_PHASES: Final = {phase.value: phase.name.lower() for phase in Phase} | {Phase.DATA_WAIT.value: "loop"}
"""Names of the phases, by number; version 0.1 recorded all of the loop's own code as a wait for data."""


def decode_entries(
    rows: Iterable[Sequence[int]], signatures: Mapping[int, Signature], call_sites: Mapping[int, CallSite]
) -> tuple[Entry, ...]:
    """Decode entries of a live log or of a file.

    Args:
        rows: fields as in ``group_log.ENTRY_FIELDS``.
        signatures: signatures of this rank, by number.
        call_sites: call sites of this rank, by number.
    """
    return tuple(
        Entry(
            number=number,
            signature=signatures.get(signature, UNKNOWN_SIGNATURE),
            step=step,
            # Inside join() ranks may be anywhere in their data, and a rank that has joined is at no batch at all.
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
    """Return the name of a phase in evidence; None outside a training step and for an unknown number."""
    return _PHASES.get(phase)
