"""Text reports of a verdict and its evidence, for the stderr of a training and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from overlapscope.diagnosis.evidence import UNKNOWN_STEP, CallSite, Entry, Evidence, GroupOrder, RankEvidence
from overlapscope.diagnosis.text import (
    at_line,
    collective_text,
    format_device_progress,
    format_position,
    format_recorded_until,
    group_text,
)
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.errors import make_printable
from overlapscope.text import format_ranks, rank_list
from overlapscope.trace.collective_log import POINT_TO_POINT
from overlapscope.trace.schema import NO_BUCKET

_MAX_SINGLE_RANKS: Final = 8
_MAX_LINES: Final = 24
_MAX_PARAMETERS: Final = 12
_MAX_SIDES: Final = 4
_MAX_CELL_WIDTH: Final = 62
_NEVER_LAUNCHED: Final = "never launched"
_NOT_YET_LAUNCHED: Final = "not launched yet"
_NOT_SHOWN: Final = "..."
"""The entry is not among those that were read, or its signature is lost."""
_NOTHING: Final = (_NEVER_LAUNCHED, _NOT_YET_LAUNCHED, _NOT_SHOWN)
_PATH_PARTS: Final = 2
_LASTING_DAMAGE: Final[dict[FaultKind, str]] = {
    "swapped collectives": "what depends on these results is wrong",
    "step behind": "results are wrong",
    "batch skipped": "averages are of batches that don't belong together",
    "not reduced": "results are wrong",
    "not finite": "results are wrong",
    "replicas differ": "results are wrong",
}
"""What is wrong afterwards with a job that trains on with a fault."""
_MARKS: Final = {"announced": "not launched", "launched": "not completed", "failed": "failed", "completed": ""}


def format_report(verdict: Verdict, evidence: Evidence) -> str:
    """Format the report: what happened, then the position of each rank, what differs, and what to try.

    A healthy job gets one line.
    """
    if verdict.kind == "healthy":
        lines = [verdict.sentence, *verdict.evidence, *(f"Remark: {one.sentence}" for one in verdict.remarks)]
        return make_printable("\n".join(lines), keep="\t\n")
    parts = [[verdict.sentence]]
    if verdict.alternative:
        parts[0].append(f"This is likely, not certain: {verdict.alternative}.")
    if lasting := describe_lasting_damage(verdict, evidence):
        parts[0].append(lasting)
    if evidence.ranks:
        parts.append(["Last known positions:", *_position_lines(evidence), *_off_lines(evidence)])
    if verdict.windows:
        parts.append(_sequences(verdict, evidence))
    if unready := _unready(verdict, evidence):
        parts.append(unready)
    for title, sentences in (
        ("Evidence:", verdict.evidence),
        ("Also found, probably consequences:", verdict.also),
        ("What to try:", verdict.advice),
        ("Remarks:", [one.sentence for one in verdict.remarks]),
    ):
        if sentences:
            parts.append([title, *(f"  - {sentence}" for sentence in sentences)])
    return make_printable("\n\n".join("\n".join(part) for part in parts), keep="\t\n")


def describe_lasting_damage(verdict: Verdict, evidence: Evidence) -> str:
    """Say that a job trained on, and since when its results are wrong; empty if the fault stopped it."""
    damage = _LASTING_DAMAGE.get(verdict.kind)
    since = -1 if verdict.step is None else verdict.step
    reached = (max(one.steps_done or 0, one.position.step if one.position else 0) for one in evidence.ranks.values())
    if damage is None or max(reached, default=0) <= since + 1:
        return ""
    if verdict.step is None:
        return f"The job did not stop there: {damage}."
    is_range = verdict.last_step not in (None, verdict.step)
    begin = f"a step from {verdict.step} to {verdict.last_step}" if is_range else f"step {verdict.step}"
    return f"The job did not stop there: {damage} from {begin} on."


def _position_lines(evidence: Evidence) -> list[str]:
    """Return one line per rank; with many ranks, one line for all with the same position."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, one in sorted(evidence.ranks.items()):
        row = (one.liveness, _where(one), _newest(evidence, rank))
        key = row if len(evidence.ranks) > _MAX_SINGLE_RANKS else (*row, str(rank))
        rows.setdefault(key, []).append(rank)
    missing = [rank for rank in evidence.expected_ranks if rank not in evidence.ranks]
    if missing:
        rows[("no log", "", "")] = missing
    table: list[tuple[str, ...]] = [("rank", "process", "where", "latest collective")]
    table += [(format_ranks(ranks), *key[:3]) for key, ranks in rows.items()]
    lines = _table(table)
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"  ... and {len(lines) - _MAX_LINES} more groups of ranks"]
    return lines


def _off_lines(evidence: Evidence) -> list[str]:
    """Say which ranks did not record their latest steps, so that no phase is known."""
    by_step: dict[int, list[int]] = {}
    for rank, one in sorted(evidence.ranks.items()):
        if one.off_since is not None:
            by_step.setdefault(one.off_since, []).append(rank)
    return [
        f"Recording was off from step {step} on, on {rank_list(ranks)}: their collectives say where they were."
        for step, ranks in by_step.items()
    ]


def _where(one: RankEvidence) -> str:
    if one.unrecorded_because is not None:
        return format_recorded_until(one)
    if one.liveness == "ended":
        return f"{one.steps_done} steps done" if one.steps_done else ""
    if one.failure:
        return f"{one.failure.type}{at_line(_shortened(one.failure.call_site))}"
    position = one.position
    return format_position(replace(position, call_site=_shortened(position.call_site))) if position else ""


def _shortened(site: CallSite | None) -> CallSite | None:
    """Shorten the path of a call site to its end, for a table."""
    if site is None:
        return None
    parts = site.file.split("/")
    return site if len(parts) <= _PATH_PARTS else replace(site, file="/".join(["...", *parts[-_PATH_PARTS:]]))


def _newest(evidence: Evidence, rank: int) -> str:
    latest = [
        (window[-1].announced_ns, group, window[-1])
        for group in (*evidence.groups, *evidence.point_to_point_orders)
        if (window := group.windows.get(rank))
        and window[-1].number == group.latest.get(rank)
        and window[-1].signature.role != "segment"
    ]
    if not latest:
        numbers = [f"{group.latest[rank]} of {group_text(group)}" for group in evidence.groups if rank in group.latest]
        return ", ".join(numbers[:2])
    _, group, entry = max(latest, key=lambda one: one[0])
    if entry.signature.op in POINT_TO_POINT:  # each rank numbers its own
        return f"{group_text(group)}: {_short(entry)}"
    return f"{entry.number} of {group_text(group)}: {_short(entry)}"


def _sequences(verdict: Verdict, evidence: Evidence) -> list[str]:
    """Return what the ranks did around the first difference, side by side; ranks that did the same share a column."""
    group = _find_group(verdict, evidence)
    columns = _columns(verdict.windows)
    missing = _NOT_YET_LAUNCHED if evidence.is_live else _NEVER_LAUNCHED

    def format_cell(ranks: tuple[int, ...], entry: Entry | None, number: int) -> str:
        if entry is not None:
            return _format_entry(entry, show_batch=verdict.kind == "batch skipped")
        return missing if group is not None and number > group.latest.get(ranks[0], 0) else _NOT_SHOWN

    table: list[tuple[str, ...]] = [("", "#", *(f"rank {format_ranks(ranks)}" for ranks in columns))]
    for number in sorted(set().union(*columns.values())):
        cells = [format_cell(ranks, entries.get(number), number) for ranks, entries in columns.items()]
        table.append((">" if number == verdict.number else "", str(number), *_mark_equal(cells)))
        if number == verdict.number:
            table += _call_site_rows([entries.get(number) for entries in columns.values()])
    title = group_text(group or GroupOrder(name=verdict.group or "", ranks=()))
    return [f"Collectives of {title}:", *_table(table)]


def _mark_equal(cells: Sequence[str]) -> list[str]:
    """Return cells with ``=`` in place of those that say the same as the first."""
    return [*cells[:1], *("=" if cell == cells[0] and cell not in _NOTHING else cell for cell in cells[1:])]


def _call_site_rows(entries: Sequence[Entry | None]) -> list[tuple[str, ...]]:
    """Return one row with the call site of each entry; none if all are unknown."""
    sites = [at_line(_shortened(entry.call_site)) if entry else "" for entry in entries]
    return [("", "", *(f" {site}" for site in sites))] if any(sites) else []


def _find_group(verdict: Verdict, evidence: Evidence) -> GroupOrder | None:
    """Return the group that the windows are of; None if they are of several.

    A group and the messages between its ranks have the same name.
    """
    return next(
        (
            one
            for one in (*evidence.groups, *evidence.point_to_point_orders)
            if one.name == verdict.group
            and all(one.windows.get(rank, ())[-1:] == own[-1:] for rank, own in verdict.windows.items())
        ),
        None,
    )


def _columns(windows: dict[int, tuple[Entry, ...]]) -> dict[tuple[int, ...], dict[int, Entry]]:
    """Return the entries by number of the first few sets of ranks that did the same."""
    same: dict[tuple[object, ...], list[int]] = {}
    for rank, window in sorted(windows.items()):
        same.setdefault(tuple(_what(entry) for entry in window), []).append(rank)
    return {
        tuple(ranks): {entry.number: entry for entry in windows[ranks[0]]} for ranks in list(same.values())[:_MAX_SIDES]
    }


def _what(entry: Entry) -> tuple[object, ...]:
    """Return what has to be equal on ranks that share a column."""
    signature = entry.signature
    called = signature.hash, signature.names, entry.call_site
    return entry.number, *called, entry.step, entry.batch, format_device_progress(entry)


def _format_entry(entry: Entry, *, show_batch: bool) -> str:
    batch = f", batch {entry.batch}" if show_batch and entry.batch is not None else ""
    state = "".join(f", {text}" for text in (_MARKS[entry.state], format_device_progress(entry)) if text)
    step = "" if entry.step == UNKNOWN_STEP else f"step {entry.loop_step}{batch}: "
    return f"{step}{_short(entry)}{state}"


def _short(entry: Entry) -> str:
    text = collective_text(entry, with_names=entry.signature.bucket == NO_BUCKET)
    return text if len(text) <= _MAX_CELL_WIDTH else text[: _MAX_CELL_WIDTH - 3] + "..."


def _unready(verdict: Verdict, evidence: Evidence) -> list[str]:
    if verdict.kind != "gradients never ready":
        return []
    lines = [
        f"  rank {rank}: {parameter.name}, bucket {parameter.bucket}, in {parameter.module}"
        for rank in verdict.named or verdict.concerned
        for parameter in (evidence.ranks[rank].unready if rank in evidence.ranks else ())
    ]
    if not lines:
        return []
    if len(lines) > _MAX_PARAMETERS:
        lines = [*lines[:_MAX_PARAMETERS], f"  ... and {len(lines) - _MAX_PARAMETERS} more"]
    return ["Parameters that got no gradient:", *lines]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their content."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]
