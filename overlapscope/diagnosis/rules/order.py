"""Ranks whose collectives are not the same, in the same order."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import Entry, GroupOrder
from overlapscope.diagnosis.facts import Facts, Wait, minority
from overlapscope.diagnosis.rules.continuation import Continuation, continuation_of
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wording import (
    at,
    capitalised,
    collective_text,
    group_text,
    in_step,
    joined,
    loop_step,
    ranks_text,
    verb,
)
from overlapscope.trace.group_log import FAILED
from overlapscope.trace.signature import NO_BUCKET

_SEVERITY: Final = ("signature", "step", "batch", "names")
_MOST_SHOWN: Final = 8
_STEPS_LEFT_BEHIND: Final = 2
"""Steps of grace: a collective of the previous step may still be about to be launched, say by another thread."""
_ADVICE: Final[dict[str, str]] = {
    "different collectives": "Make all ranks take the same branch, with tensors of the same size and dtype.",
    "missing collective": "Look for a collective inside an `if` that depends on the rank or on the data.",
    "swapped collectives": "Launch collectives in the same order on all ranks, not in that of a set or of completion.",
    "step behind": "Enter no_sync() and skip steps (NaN checks) on all ranks or on none; let the ranks agree first.",
    "batch skipped": "Skip or repeat a batch on all ranks or none; DistributedSampler and join() keep them together.",
}


def diverged(facts: Facts) -> Verdict | None:
    """The first entry of any group that is not the same on all ranks."""
    found = [group for group in facts.evidence.groups if group.first_divergence is not None]
    if not found:
        return None
    group = min(found, key=_when)
    number = group.first_divergence
    assert number is not None
    at_number = {rank: entry for rank, window in group.windows.items() for entry in window if entry.number == number}
    sides = _sides(group, at_number)
    if len(sides) < 2:
        return None
    blamed = minority(sides, len(group.ranks))
    side, other = _two_sides(sides, blamed)
    a, b = at_number[side[0]], at_number[other[0]]
    following = [[entry for entry in group.windows[ranks[0]] if entry.number >= number] for ranks in (side, other)]
    kind, sentence = _say(group, number, side, other, a, b, continuation_of(*following))
    sites = {rank: entry.call_site for rank, entry in sorted(at_number.items()) if entry.call_site}
    concerned = tuple(sorted(rank for ranks in sides for rank in ranks))
    shown = {*blamed[:_MOST_SHOWN], *side[:1], *other[:1]} | (
        set(concerned) if len(concerned) <= _MOST_SHOWN else set()
    )
    bucket = next((entry.signature.bucket for entry in (a, b) if entry.signature.bucket != NO_BUCKET), None)
    names = next((e.signature.parameters for e in (a, b) if e.signature.parameters), ())
    evidence = []
    if group.is_since_before:
        evidence.append("The first difference is older than what is left of the logs; this is the oldest entry left.")
    if absent := [rank for rank in group.ranks if rank not in at_number]:
        evidence.append(f"There is no collective {number} of {ranks_text(absent)} to compare with.")
    unreduced = [rank for rank in at_number if _is_in_no_sync(facts, rank, min(a.step, b.step))]
    if unreduced:
        has = verb(unreduced, "has", "have")
        evidence.append(f"{capitalised(ranks_text(unreduced))} {has} run every backward since then under no_sync().")
    if already := _already_elsewhere(group, number, side[0], other[0]):
        evidence.append(already)
    if not blamed:
        evidence.append("No side has a majority, so no rank is blamed.")
    return Verdict(
        kind=kind,
        sentence=sentence,
        blamed=blamed,
        concerned=concerned,
        step=loop_step(min(a, b, key=lambda entry: entry.step)),
        group=group.name,
        number=number,
        bucket=bucket,
        parameters=names,
        call_sites={rank: sites[rank] for rank in sorted(shown) if rank in sites} or None,
        windows={rank: group.windows[rank] for rank in sorted(shown)},
        evidence=tuple(evidence),
        advice=(_ADVICE[kind],),
    )


def _already_elsewhere(group: GroupOrder, number: int, a: int, b: int) -> str:
    """Where two ranks have launched the same before the first difference, at lines that differ and had not before."""
    lines = [
        {entry.number: entry.call_site for entry in group.windows[rank] if entry.number < number} for rank in (a, b)
    ]
    common = sorted(lines[0].keys() & lines[1].keys())
    apart = [one for one in common if lines[0][one] != lines[1][one]]
    if not apart or apart[0] == common[0] or apart != common[common.index(apart[0]) :]:
        return ""
    first = apart[0]
    sites = [f"{lines[index][first]} on rank {rank}" for index, rank in enumerate((a, b)) if lines[index][first]]
    return f"Already collective {first} was launched at different lines: {' and '.join(sites)}." if sites else ""


def _is_in_no_sync(facts: Facts, rank: int, step: int) -> bool:
    """Whether a rank has gone through a step without reducing anything, and does not reduce since."""
    one = facts.ranks.get(rank)
    return one is not None and one.no_sync_since is not None and one.no_sync_since <= step < one.steps_done


def interleaved(facts: Facts) -> Verdict | None:
    """Ranks wait for each other, each in a group whose next collective another of them has not reached."""
    waits = _cycle(facts)
    if len({(wait.group.name, wait.is_point_to_point) for wait in waits}) < 2:
        return None
    first = min(waits, key=lambda wait: wait.entry.step)
    gone_on = tuple(wait.rank for wait in waits if wait.rank in first.late and wait.entry.step > first.entry.step)
    if gone_on:
        return _left_out(facts, first, gone_on)
    if len({wait.group.name for wait in waits}) == 1:
        return _unanswered(waits)
    sides: dict[str, list[int]] = {}
    for wait in facts.waits:
        sides.setdefault(wait.group.name, []).append(wait.rank)
    said = [
        f"rank {wait.rank} waits in {group_text(wait.group)} ({collective_text(wait.entry)}{at(wait.entry.call_site)}) "
        f"for {ranks_text(wait.late)}"
        for wait in waits
    ]
    # Who is in one of the groups only has no choice where to wait, so that it does not count.
    common = set.intersection(*(set(wait.group.ranks) for wait in waits))
    of_both = {name: [rank for rank in ranks if rank in common] for name, ranks in sides.items()}
    return Verdict(
        kind="groups interleaved",
        sentence=f"Ranks have entered process groups in different orders and wait for each other: {joined(said)}.",
        alternative=f"{ranks_text(first.late)} may have left out the collective that rank {first.rank} waits in",
        blamed=minority(of_both.values(), len(common)),
        concerned=tuple(sorted(wait.rank for wait in waits)),
        step=loop_step(first.entry),
        group=first.group.name,
        number=first.entry.number,
        call_sites={wait.rank: wait.entry.call_site for wait in waits if wait.entry.call_site} or None,
        windows={wait.rank: wait.group.windows[wait.rank] for wait in waits},
        evidence=("Within each group the order is the same on all ranks, as far as they got.",),
        advice=("Launch the collectives of different groups in the same order on all ranks.",),
    )


def _unanswered(waits: list[Wait]) -> Verdict:
    """A send or a recv whose other side waits in something else of the same group."""
    wait = next(one for one in waits if one.is_point_to_point)
    (peer,) = wait.late
    other = next((one for one in waits if one.rank == peer), None)
    does = "sent" if wait.entry.signature.op == "recv" else "received"
    elsewhere = ""
    if other is not None:
        elsewhere = (
            f": it waits for {ranks_text(other.late)} in {collective_text(other.entry)}{at(other.entry.call_site)}"
        )
    return Verdict(
        kind="missing collective",
        sentence=f"Rank {wait.rank} waits in {collective_text(wait.entry)}{at(wait.entry.call_site)}"
        f"{in_step(wait.entry)}, and rank {peer} has not {does}{elsewhere}.",
        concerned=tuple(sorted(one.rank for one in waits)),
        step=loop_step(wait.entry),
        group=wait.group.name,
        number=wait.entry.number,
        call_sites={one.rank: one.entry.call_site for one in waits if one.entry.call_site} or None,
        windows={one.rank: one.group.windows[one.rank] for one in waits},
        advice=("Give every recv a send on the other side, before either of the two enters a collective.",),
    )


def left_out(facts: Facts) -> Verdict | None:
    """A collective failed, or does not end, because a rank of its group never entered it and went on."""
    if facts.is_from_dumps:
        return None
    known = facts.ranks.keys() - set(facts.unrecorded)
    for group in facts.evidence.groups:
        newest = {rank: group.newest.get(rank, 0) for rank in group.ranks if rank in known}
        number = min(newest.values(), default=0) + 1
        entries = [(rank, e) for rank, window in group.windows.items() for e in window if e.number == number]
        if not entries or any(e.state == "completed" for _, e in entries):
            continue
        rank, entry = min(entries, key=lambda pair: pair[1].announced_ns)
        late = tuple(other for other, reached in newest.items() if reached < number)
        has_failed = any(e.flags & FAILED for _, e in entries)
        steps = 1 if has_failed else _STEPS_LEFT_BEHIND
        gone_on = tuple(other for other in late if _newest_step(facts, other) >= entry.step + steps)
        if gone_on:
            return _left_out(facts, Wait(rank, group, entry, late), gone_on)
    return None


def _newest_step(facts: Facts, rank: int) -> int:
    entries = [entry for group in facts.evidence.groups if (entry := facts.newest(group, rank)) is not None]
    return max((entry.step for entry in entries), default=0)


def _cycle(facts: Facts) -> list[Wait]:
    """Ranks that each wait for the next one, and the last for the first."""
    if facts.awaited or not any(facts.is_stuck(rank) for rank in facts.waiting):
        return []
    by_rank = {wait.rank: wait for wait in facts.waits}
    path: list[int] = []
    rank = min(by_rank, default=None)
    while rank is not None and rank not in path:
        path.append(rank)
        rank = next((late for late in by_rank[rank].late if late in by_rank), None)
    return [] if rank is None else [by_rank[one] for one in path[path.index(rank) :]]


def _left_out(facts: Facts, wait: Wait, ranks: tuple[int, ...]) -> Verdict:
    """Ranks are in a later step already, although others still wait for them in an earlier one."""
    missed = wait.missed_by(ranks)
    whom = f"{ranks_text(ranks)}, which {verb(ranks, 'has', 'have')} gone on to the next step without it"
    fate = (
        f"which failed because {ranks_text(ranks)} never joined it and went on to the next step"
        if missed.flags & FAILED
        else f"and waits there for {whom}"
    )
    return Verdict(
        kind="missing collective",
        sentence=f"{capitalised(in_step(missed).lstrip())} rank {wait.rank} launched {collective_text(missed)}"
        f"{at(missed.call_site)} in {group_text(wait.group)}{',' if missed.flags & FAILED else ''} {fate}.",
        blamed=ranks if len(facts.world) > 2 else (),
        concerned=tuple(sorted({wait.rank, *ranks})),
        step=loop_step(missed),
        group=wait.group.name,
        number=missed.number,
        parameters=missed.signature.parameters,
        call_sites={wait.rank: missed.call_site} if missed.call_site else None,
        windows={rank: wait.group.windows[rank] for rank in sorted({wait.rank, *ranks}) if rank in wait.group.windows},
        advice=(_ADVICE["missing collective"],),
    )


def _when(group: GroupOrder) -> tuple[int, int, int]:
    number = group.first_divergence or 0
    entries = [entry for window in group.windows.values() for entry in window if entry.number == number]
    step = min((entry.step for entry in entries), default=0)
    severity = _SEVERITY.index(group.divergence) if group.divergence in _SEVERITY else len(_SEVERITY)
    return step, min((entry.announced_ns for entry in entries), default=0), severity


def _sides(group: GroupOrder, at_number: dict[int, Entry]) -> list[list[int]]:
    """Ranks by what they have there, the largest side first."""
    batches = _batch_offsets(group) if group.divergence == "batch" else {}
    sides: dict[object, list[int]] = {}
    for rank, entry in sorted(at_number.items()):
        key: object = entry.signature.hash
        if group.divergence == "step":
            key = entry.step
        elif group.divergence == "batch":
            key = batches.get(rank)
        elif group.divergence == "names":
            key = entry.signature.names
        sides.setdefault(key, []).append(rank)
    if group.divergence == "batch":
        sides.pop(None, None)
    return sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))


def _has_reduced(group: GroupOrder, rank: int, step: int, before: int) -> bool:
    """Whether a rank has launched a bucket of a step before an entry."""
    return any(
        entry.step == step and entry.number < before and entry.signature.bucket != NO_BUCKET
        for entry in group.windows[rank]
    )


def _batch_offsets(group: GroupOrder) -> dict[int, int]:
    """How far each rank's batch has advanced at the first difference, since an entry at which all know theirs."""
    number = group.first_divergence or 0
    known = {
        rank: batches
        for rank, window in group.windows.items()
        if number in (batches := {entry.number: entry for entry in window if entry.batch is not None})
    }
    common = set.intersection(*(set(batches) for batches in known.values())) if known else set()
    before = {one for one in common if one < number}
    earlier = {one for one in before if all(batches[one].step < batches[number].step for batches in known.values())}
    if not before:
        return {}
    since = max(earlier or before)
    return {rank: (batches[number].batch or 0) - (batches[since].batch or 0) for rank, batches in known.items()}


def _two_sides(sides: list[list[int]], blamed: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """A side without blamed ranks, and the first of the others."""
    ordered = sorted(sides, key=lambda ranks: (bool(set(ranks) & set(blamed)), ranks))
    return ordered[0], ordered[1]


def _say(
    group: GroupOrder, number: int, side: list[int], other: list[int], a: Entry, b: Entry, continuation: Continuation
) -> tuple[FaultKind, str]:
    these, those = ranks_text(side), ranks_text(other)
    where = f"as collective {number} of {group_text(group)}"
    if group.divergence == "step" and a.signature.bucket == NO_BUCKET:
        ahead, behind = (other, side) if b.step > a.step else (side, other)
        earlier, later = sorted((a, b), key=lambda entry: entry.step)
        return "missing collective", (
            f"{capitalised(in_step(earlier).lstrip())} {ranks_text(ahead)} skipped {collective_text(a)}"
            f"{at(b.call_site)}: {where}, {verb(ahead, 'its', 'their')} call of step {later.loop_step} is matched with "
            f"that of step {earlier.loop_step} of {ranks_text(behind)}, and so on."
        )
    if group.divergence == "step":
        ahead, behind = (other, side) if b.step > a.step else (side, other)
        before, after = min(a.step, b.step), max(a.step, b.step)
        if _has_reduced(group, ahead[0], before, number):
            return "step behind", (
                f"From step {before} on, gradients of different steps are averaged: {ranks_text(behind)} "
                f"{verb(behind, 'has', 'have')} reduced again in step {before}, without an update of the optimizer in "
                f"between, and {ranks_text(ahead)} {verb(ahead, 'is', 'are')} in step {after} by then ({where}, "
                f"{collective_text(a)})."
            )
        return "step behind", (
            f"From step {before} on, gradients of different steps are averaged: {ranks_text(ahead)} launched no "
            f"bucket in step {before}, so {verb(ahead, 'its', 'their')} step {after} is averaged with step "
            f"{before} of {ranks_text(behind)} ({where}, {collective_text(a)})."
        )
    if group.divergence == "batch":
        return "batch skipped", (
            f"From step {min(a.step, b.step)} on, the ranks average gradients of different batches: "
            f"{those} {verb(other, 'is', 'are')} at batch {b.batch} where {these} {verb(side, 'is', 'are')} at batch "
            f"{a.batch}, and until then they advanced together ({where}, {collective_text(a)})."
        )
    differ = (
        f"{in_step(b)} {those} launched {collective_text(b)}{at(b.call_site)} {where}, where {these} "
        f"launched {collective_text(a)}{at(a.call_site)}{in_step(a) if a.loop_step != b.loop_step else ''}"
    ).lstrip()
    if group.divergence == "names" or continuation.kind == "swapped":
        return "swapped collectives", capitalised(differ) + ", and the reverse nearby: the results are mixed up."
    if continuation.kind == "missing":
        extra, lacks = (side, other) if continuation.missing_on == "second" else (other, side)
        count = "one collective" if continuation.count == 1 else f"{continuation.count} collectives"
        return "missing collective", (
            f"{capitalised(differ)}: from there on {ranks_text(lacks)} {verb(lacks, 'is', 'are')} {count} short, or "
            f"{ranks_text(extra)} {verb(extra, 'has', 'have')} {count} too many."
        )
    return "different collectives", capitalised(differ) + "."
