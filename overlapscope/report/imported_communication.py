"""Build the section on the communication of imported profiles, by process group and operation."""

from __future__ import annotations

from overlapscope.report.report import Column, Section, Table
from overlapscope.text import count_of, format_ns, format_share
from overlapscope.trace.imported_communication import GroupCommunication, ImportedCommunication


def build_communication_sections(found: ImportedCommunication | None) -> tuple[Section, ...]:
    """Build the section from what the profiles say of all communication; none of a recording that is no import."""
    return () if found is None else (_build(found, max(1, found.steps)),)


def _build(found: ImportedCommunication, per: int) -> Section:
    return Section(
        name="communication",
        title="Communication in the profiles",
        headline=_describe(found, per),
        basis=_describe_basis(found),
        tables=(_tabulate(found, per),) if found.groups else (),
    )


def _describe(found: ImportedCommunication, per: int) -> str:
    if not found.groups:
        return "No communication is in the profiles."
    time = f"a {format_ns(found.time_ns / per)} step" if found.steps else format_ns(found.time_ns)
    shares = [
        f"{format_share(ns / max(1.0, found.time_ns))} {what}"
        for ns, what in (
            (found.compute_ns, "something is computed"),
            (found.exposed_ns, "there is only communication"),
            (found.idle_ns, "neither"),
        )
    ]
    return f"Of {time}, in {shares[0]}, in {shares[1]}, and in {shares[2]}."


def _describe_basis(found: ImportedCommunication) -> str:
    basis = f"By what ran in the profiles of {count_of(found.ranks, 'rank')}"
    return f"{basis}, in {count_of(found.steps, 'step')}." if found.steps else f"{basis}, from the first to the last."


def _tabulate(found: ImportedCommunication, per: int) -> Table:
    rows = [
        {
            "group": "DDP's buckets" if one.is_bucket else one.group or "unnamed",
            "op": one.op,
            "count": f"{one.count / per:.4g}",
            "bytes": one.bytes / one.count if one.bytes else None,
            "time": one.time_ns / per,
            "alone": one.exposed_ns / per,
            "wait": None if one.wait_ns is None else one.wait_ns / per,
            "last": _describe_last(one),
        }
        for one in found.groups
    ]
    return Table(
        name="communication",
        title=f"Communication {'of a step' if found.steps else 'of the profile'}, means of ranks, in milliseconds",
        columns=(
            Column("group", "group", "text"),
            Column("op", "operation", "text"),
            Column("count", "number", "text"),
            Column("bytes", "mean size", "bytes"),
            Column("time", "time", "ms"),
            Column("alone", "alone", "ms"),
            Column("wait", "wait", "ms"),
            Column("last", "last to start", "text"),
        ),
        rows=tuple(rows),
        notes=_list_notes(found),
    )


def _describe_last(one: GroupCommunication) -> str:
    """Say which rank was the last to start most often, and how often: ``rank 7 (4 of 5)``."""
    if not one.last_ranks:
        return ""
    rank, (count, of) = next(iter(one.last_ranks.items()))
    return f"rank {rank} ({count:,} of {of:,})"


def _list_notes(found: ImportedCommunication) -> tuple[str, ...]:
    notes = ["Alone: nothing is computed meanwhile, whatever phase that is in."]
    if any(one.wait_ns is not None for one in found.groups):
        notes.append("Wait: for the last rank to start, which has the shortest kernel, as all leave together.")
    return tuple(notes)
