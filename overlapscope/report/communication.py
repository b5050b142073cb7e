"""Build the section on communication by process group and operation: of imported profiles, or the script's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from overlapscope.breakdown.summary import Summary
from overlapscope.report.report import Column, Section, Table
from overlapscope.text import count_of, format_ns, format_share, format_step_ns
from overlapscope.trace.communication import GroupCommunication, ImportedCommunication, OwnCommunication


def build_communication_sections(summary: Summary) -> tuple[Section, ...]:
    """Build the section from what profiles say of all communication, or a recording of the script's own; or none."""
    if summary.imported is not None:
        return (_build(summary.imported, max(1, summary.imported.steps)),)
    return () if summary.own is None else (_build_own(summary.own, summary),)


def collect_communication(summary: Summary) -> dict[str, Any] | None:
    """Collect the same for JSON: means of ranks, of a step where there are steps."""
    found = summary.imported or summary.own
    if found is None:
        return None
    per = max(1, found.steps) if found is summary.imported else 1
    return {"steps": found.steps, "groups": [_divide(one, per) for one in found.groups]}


def _divide(one: GroupCommunication, per: int) -> dict[str, Any]:
    values = asdict(one)
    for name in ("count", "bytes", "time_ns", "exposed_ns", "wait_ns"):
        values[name] = None if values[name] is None else values[name] / per
    return values


def _build(found: ImportedCommunication, per: int) -> Section:
    return Section(
        name="communication",
        title="Communication in the profiles",
        headline=_describe(found, per),
        basis=_describe_basis(found),
        tables=(_tabulate(found, per),) if found.groups else (),
    )


def _build_own(found: OwnCommunication, summary: Summary) -> Section:
    each = "step" if summary.steps else "update"
    when = f" of a{'n' if each == 'update' else ''} {each}" if found.steps else ""
    basis = f"By the logs of {count_of(found.ranks, 'rank')}"
    table = replace(
        _tabulate_groups(found.groups, 1),
        title=f"The script's own collectives{when}, means of ranks, in milliseconds",
        notes=_list_own_notes(found),
    )
    return Section(
        name="communication",
        title="The script's own collectives",
        headline=_describe_own(found, summary),
        basis=f"{basis}, in {count_of(found.steps, each)}." if found.steps else f"{basis}.",
        tables=(table,),
    )


def _describe_own(found: OwnCommunication, summary: Summary) -> str:
    timed = [one for one in found.groups if one.time_ns is not None]
    if not timed:
        return (
            f"The script has collectives of its own in {_name_groups(found.groups)}; how long they take is not known."
        )
    longest = timed[0]
    step_ns = summary.mean.step.value if summary.steps else 0.0
    share = f" ({format_share(longest.time_ns / step_ns)})" if step_ns and longest.time_ns is not None else ""
    of = f" of {format_step_ns(step_ns)}{share}" if step_ns else " an update" if found.steps else ""
    waits = "" if longest.wait_ns is None else f", {format_ns(longest.wait_ns)} of it until the last rank has come"
    return (
        f"Of the script's own collectives, {_describe_op(longest)} in {_name_groups((longest,))} takes longest: "
        f"{format_ns(longest.time_ns)}{of}{waits}."
    )


def _name_groups(groups: Sequence[GroupCommunication]) -> str:
    return ", ".join(dict.fromkeys(one.group or "unnamed" for one in groups))


def _list_own_notes(found: OwnCommunication) -> tuple[str, ...]:
    notes = []
    if any(one.exposed_ns for one in found.groups):
        notes.append("Awaited: the line that launches it continues only when it has ended.")
    if any(one.wait_ns is not None for one in found.groups):
        notes.append("Wait: from a rank's own arrival to that of the last one.")
    if any(one.time_ns is None for one in found.groups):
        notes.append("When collectives of a device end is only in profiles: import those of torch.profiler.")
    return tuple(notes)


def _describe(found: ImportedCommunication, per: int) -> str:
    if not found.groups:
        return "No communication is in the profiles."
    time = format_step_ns(found.time_ns / per) if found.steps else format_ns(found.time_ns)
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
    return replace(
        _tabulate_groups(found.groups, per, alone="alone", last="last to start"),
        title=f"Communication {'of a step' if found.steps else 'of the profile'}, means of ranks, in milliseconds",
        notes=_list_notes(found),
    )


def _tabulate_groups(
    groups: Sequence[GroupCommunication], per: int, *, alone: str = "awaited", last: str = "last to arrive"
) -> Table:
    rows = [
        {
            "group": _describe_group(one),
            "op": _describe_op(one),
            "count": f"{one.count / per:.4g}",
            "bytes": one.bytes / one.count if one.bytes else None,
            "time": _divide_ns(one.time_ns, per),
            "alone": _divide_ns(one.exposed_ns, per),
            "wait": _divide_ns(one.wait_ns, per),
            "last": _describe_last(one),
        }
        for one in groups
    ]
    return Table(
        name="communication",
        title="",
        columns=(
            Column("group", "group", "text"),
            Column("op", "operation", "text"),
            Column("count", "number", "text"),
            Column("bytes", "mean size", "bytes"),
            Column("time", "time", "ms"),
            Column("alone", alone, "ms"),
            Column("wait", "wait", "ms"),
            Column("last", last, "text"),
        ),
        rows=tuple(rows),
    )


def _divide_ns(time_ns: float | None, per: int) -> float | None:
    return None if time_ns is None else time_ns / per


def _describe_op(one: GroupCommunication) -> str:
    return f"{one.op} of join()" if one.is_join else one.op


def _describe_group(one: GroupCommunication) -> str:
    """Name groups with their number and size, where these are known: ``tp (4 groups of 8 ranks)``."""
    name = "DDP's buckets" if one.is_bucket else one.group or "unnamed"
    if not one.members:
        return name
    of = count_of(one.members, "rank")
    return f"{name} ({of})" if one.groups == 1 else f"{name} ({one.groups:,} groups of {of})"


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
