"""Rule for ranks whose collectives differ, or are in a different order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from overlapscope.diagnosis.evidence import Entry, GroupOrder
from overlapscope.diagnosis.rules import unreduced_gradients
from overlapscope.diagnosis.rules.groups import MISSING_COLLECTIVE_ADVICE
from overlapscope.diagnosis.text import (
    at_line,
    capitalize,
    collective_text,
    group_text,
    in_step,
    join_and,
    loop_step,
    plural,
    rank_list,
)
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority
from overlapscope.trace.schema import NO_BUCKET

# Alignment of two sequences of collectives after their first difference: replaced, missing or swapped.

_MOST_MISSING: Final = 4


@dataclass(frozen=True)
class Continuation:
    """The explanation of a difference."""

    kind: Literal["replaced", "missing", "swapped"]
    missing_on: Literal["first", "second"] | None = None
    """The sequence that lacks entries."""
    count: int = 0
    """Number of entries it lacks."""


def explain_continuation(first: Sequence[Entry], second: Sequence[Entry]) -> Continuation:
    """Explain how two sequences continue, each from its first differing entry on.

    The kind is "replaced" if the entries after the first are equal again, or nothing else fits. Example: a b c and x b
    c are replaced; a b c and b a c are swapped; a b c d and b c d have one missing on the second.
    """
    a = [entry.signature.hash for entry in first]
    b = [entry.signature.hash for entry in second]
    if _agree(a[1:], b[1:]):
        return Continuation("replaced")
    if len(a) > 1 and len(b) > 1 and (a[0], a[1]) == (b[1], b[0]) and a[2:3] == b[2:3][: len(a[2:3])]:
        return Continuation("swapped")
    found = []
    for count in range(1, _MOST_MISSING + 1):
        found += [(_agree(a[count:], b), -count, Continuation("missing", "second", count))]
        found += [(_agree(a, b[count:]), -count, Continuation("missing", "first", count))]
    agreeing, _, best = max(found, key=lambda one: one[:2])
    return best if agreeing else Continuation("replaced")


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix if one is a prefix of the other; else 0."""
    both = list(zip(a, b, strict=False))
    return len(both) if all(x == y for x, y in both) else 0


_SEVERITY: Final = ("signature", "step", "batch", "names")
_MOST_SHOWN: Final = 8
_ADVICE: Final[dict[str, str]] = {
    "different collectives": "Make all ranks take the same branch, with tensors of the same size and dtype.",
    "missing collective": MISSING_COLLECTIVE_ADVICE,
    "swapped collectives": "Launch collectives in the same order on all ranks, not in that of a set or of completion.",
    "step behind": "Enter no_sync() and skip steps (NaN checks) on all ranks or on none; let the ranks agree first.",
    "batch skipped": "Skip or repeat a batch on all ranks or none; DistributedSampler and join() keep them together.",
}


def find_divergence(facts: Facts) -> Verdict | None:
    """Find the first entry of any group that is not the same on all ranks."""
    found = [group for group in facts.evidence.groups if group.first_divergence is not None]
    if not found:
        return None
    group = min(found, key=_divergence_sort_key)
    number = group.first_divergence
    assert number is not None
    at_number = {rank: entry for rank, window in group.windows.items() for entry in window if entry.number == number}
    sides = _sides(group, at_number)
    if len(sides) < 2:
        return None
    blamed = find_minority(sides, len(group.ranks))
    side, other = _two_sides(sides, blamed)
    a, b = at_number[side[0]], at_number[other[0]]
    following = [[entry for entry in group.windows[ranks[0]] if entry.number >= number] for ranks in (side, other)]
    if (passed_over := _find_update_without_reduction(facts, group, sides, min(a.step, b.step))) is not None:
        return passed_over
    kind, sentence = _describe_divergence(group, number, side, other, a, b, explain_continuation(*following))
    sites = {rank: entry.call_site for rank, entry in sorted(at_number.items()) if entry.call_site}
    concerned = tuple(sorted(rank for ranks in sides for rank in ranks))
    shown = {*blamed[:_MOST_SHOWN], *side[:1], *other[:1]} | (
        set(concerned) if len(concerned) <= _MOST_SHOWN else set()
    )
    bucket = next((entry.signature.bucket for entry in (a, b) if entry.signature.bucket != NO_BUCKET), None)
    names = next((e.signature.parameters for e in (a, b) if e.signature.parameters), ())
    evidence = []
    if group.predates_log:
        evidence.append("The first difference is older than what is left of the logs; this is the oldest entry left.")
    if absent := [rank for rank in group.ranks if rank not in at_number]:
        evidence.append(f"There is no collective {number} of {rank_list(absent)} to compare with.")
    unreduced = [rank for rank in at_number if _is_in_no_sync(facts, rank, min(a.step, b.step))]
    if unreduced:
        has = plural(unreduced, "has", "have")
        evidence.append(f"{capitalize(rank_list(unreduced))} {has} run every backward since then under no_sync().")
    if already := _first_call_site_difference(group, number, side[0], other[0]):
        evidence.append(
            f"Already collective {already[0].number} was launched at different lines:{at_line(already[0].call_site)} on "
            f"rank {side[0]},{at_line(already[1].call_site)} on rank {other[0]}."
        )
        sites |= {rank: e.call_site for rank, e in zip((side[0], other[0]), already, strict=True) if e.call_site}
    if (again := _begins_another_forward(a, b)) is not None:
        evidence.append(
            f"A broadcast of DDP's buffers begins a forward: {rank_list(side if again is a else other)} "
            f"{plural(side if again is a else other, 'has', 'have')} begun another one instead of reducing, as after "
            "a batch that was skipped, after a backward under no_sync(), or to evaluate."
        )
    evidence += _batch_progress_notes(group, sides)
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


def _find_update_without_reduction(
    facts: Facts, group: GroupOrder, sides: list[list[int]], step: int
) -> Verdict | None:
    """Return a verdict if batches differ because one side updated without reducing, as with ``.module``."""
    ranks = {rank for rank, one in facts.ranks.items() if one.unreduced is not None and one.unreduced.step == step}
    if group.divergence != "batch" or not any(ranks == set(side) for side in sides):
        return None
    found = unreduced_gradients.find_unreduced_gradients(facts)
    if found is None or found.step != step:
        return None
    ahead = (
        f"{capitalize(rank_list(found.concerned))} {plural(found.concerned, 'is', 'are')} at another batch since then."
    )
    windows = {rank: group.windows[rank] for ranks in sides for rank in ranks[:_MOST_SHOWN]}
    return replace(
        found,
        group=group.name,
        number=group.first_divergence,
        windows=windows,
        evidence=(*found.evidence, ahead),
    )


def _begins_another_forward(a: Entry, b: Entry) -> Entry | None:
    """Return the entry that begins a forward while other ranks are in the backward of the same step."""
    for one, other in ((a, b), (b, a)):
        if one.signature.role == "buffers" and other.signature.bucket != NO_BUCKET and one.step == other.step:
            return one
    return None


def _batch_progress_notes(group: GroupOrder, sides: list[list[int]]) -> list[str]:
    """Return how far the sides are in their data, if they diverged there since a common collective."""
    if group.divergence == "batch" or len(offsets := _batch_offsets(group)) < sum(map(len, sides)):
        return []
    number = group.first_divergence
    at_batch = {entry.batch for window in group.windows.values() for entry in window if entry.number == number}
    ahead = [{offsets[rank] for rank in side} for side in sides]
    if len(at_batch) < 2 or any(len(one) > 1 for one in ahead) or len(set().union(*ahead)) < len(sides):
        return []
    where = [
        f"{rank_list(side)} to batch {entry.batch}"
        for side in sides
        for entry in group.windows[side[0]]
        if entry.number == number
    ]
    return [f"In their data they had gone on unequally by then: {join_and(where)}."]


def _first_call_site_difference(group: GroupOrder, number: int, a: int, b: int) -> tuple[Entry, Entry] | None:
    """Return the first common entry that two ranks launched at different lines, if all later ones differ as well."""
    of_a, of_b = ({e.number: e for e in group.windows[rank] if e.number < number} for rank in (a, b))
    common = sorted(of_a.keys() & of_b.keys())
    differing = [one for one in common if of_a[one].call_site != of_b[one].call_site]
    if not differing or differing[0] == common[0] or differing != common[common.index(differing[0]) :]:
        return None
    return of_a[differing[0]], of_b[differing[0]]


def _is_in_no_sync(facts: Facts, rank: int, step: int) -> bool:
    """Return True if a rank has gone through a step without reducing anything, and has not reduced since."""
    one = facts.ranks.get(rank)
    return one is not None and one.no_sync_since is not None and one.no_sync_since <= step < one.steps_done


def _divergence_sort_key(group: GroupOrder) -> tuple[int, int, int]:
    number = group.first_divergence or 0
    entries = [entry for window in group.windows.values() for entry in window if entry.number == number]
    step = min((entry.step for entry in entries), default=0)
    severity = _SEVERITY.index(group.divergence) if group.divergence in _SEVERITY else len(_SEVERITY)
    return step, min((entry.announced_ns for entry in entries), default=0), severity


def _sides(group: GroupOrder, at_number: dict[int, Entry]) -> list[list[int]]:
    """Group ranks by what they have at the first difference, the largest side first."""
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
    """Return True if a rank has launched a bucket of a step before an entry."""
    return any(
        entry.step == step and entry.number < before and entry.signature.is_gradient_reduction
        for entry in group.windows[rank]
    )


def _reaches_back(group: GroupOrder, rank: int, step: int) -> bool:
    """Return True if the window holds everything that a rank launched in a step before the first difference."""
    number = group.first_divergence or 0
    return any(entry.number < number and (entry.step < step or entry.number == 1) for entry in group.windows[rank])


def _has_passed_over_reducing(group: GroupOrder, rank: int, other: int) -> bool:
    """Return True if a rank updated without reducing in the step in which another one begins to reduce."""
    number = group.first_divergence or 0
    own = {entry.number: entry for entry in group.windows[rank]}
    theirs = next(entry for entry in group.windows[other] if entry.number == number)
    is_reducing = theirs.signature.is_gradient_reduction and own[number].signature.bucket == NO_BUCKET
    has_passed_over = not _has_reduced(group, rank, theirs.step, number)
    return is_reducing and has_passed_over and _reaches_back(group, rank, theirs.step)


def _batch_offsets(group: GroupOrder) -> dict[int, int]:
    """Return how far each rank's batch advanced to the first difference, since an entry at which all batches are known.

    Example: batches 7, 8, 9 on rank 0 and 0, 1, 3 on rank 1 at numbers 4, 5 and 6, the first of another step, differ at
    6: since 5 they advanced by 1 and 2.
    """
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
    """Return a side without blamed ranks, and the first of the others."""
    ordered = sorted(sides, key=lambda ranks: (bool(set(ranks) & set(blamed)), ranks))
    return ordered[0], ordered[1]


def _describe_divergence(
    group: GroupOrder, number: int, side: list[int], other: list[int], a: Entry, b: Entry, continuation: Continuation
) -> tuple[FaultKind, str]:
    these, those = rank_list(side), rank_list(other)
    where = f"as collective {number} of {group_text(group)}"
    if group.divergence == "step" and a.signature.bucket == NO_BUCKET:
        ahead, behind = (other, side) if b.step > a.step else (side, other)
        earlier, later = sorted((a, b), key=lambda entry: entry.step)
        return "missing collective", (
            f"{capitalize(in_step(earlier).lstrip())} {rank_list(ahead)} skipped {collective_text(a)}"
            f"{at_line(b.call_site)}: {where}, {plural(ahead, 'its', 'their')} call of step {later.loop_step} is matched with "
            f"that of step {earlier.loop_step} of {rank_list(behind)}, and so on."
        )
    if group.divergence == "step":
        ahead, behind = (other, side) if b.step > a.step else (side, other)
        before, after = min(a.step, b.step), max(a.step, b.step)
        if _has_reduced(group, ahead[0], before, number):
            return "step behind", (
                f"From step {before} on, gradients of different steps are averaged: {rank_list(behind)} "
                f"{plural(behind, 'has', 'have')} reduced again in step {before}, without an update of the optimizer in "
                f"between, and {rank_list(ahead)} {plural(ahead, 'is', 'are')} in step {after} by then ({where}, "
                f"{collective_text(a)})."
            )
        if not _reaches_back(group, ahead[0], before):  # what it launched in that step is unknown
            return "step behind", (
                f"From step {before} on, gradients of different steps are averaged: {rank_list(ahead)} "
                f"{plural(ahead, 'is', 'are')} in step {after} where {rank_list(behind)} {plural(behind, 'is', 'are')} "
                f"in step {before} ({where}, {collective_text(a)})."
            )
        return "step behind", (
            f"From step {before} on, gradients of different steps are averaged: {rank_list(ahead)} launched no "
            f"bucket in step {before}, so {plural(ahead, 'its', 'their')} step {after} is averaged with step "
            f"{before} of {rank_list(behind)} ({where}, {collective_text(a)})."
        )
    if group.divergence == "batch":
        return "batch skipped", (
            f"From step {min(a.step, b.step)} on, the ranks average gradients of different batches: "
            f"{those} {plural(other, 'is', 'are')} at batch {b.batch} where {these} {plural(side, 'is', 'are')} at batch "
            f"{a.batch}, and until then they advanced together ({where}, {collective_text(a)})."
        )
    differ = (
        f"{in_step(b)} {those} launched {collective_text(b)}{at_line(b.call_site)} {where}, where {these} "
        f"launched {collective_text(a)}{at_line(a.call_site)}{in_step(a) if a.loop_step != b.loop_step else ''}"
    ).lstrip()
    for ranks, own, step in ((side, a, b.step), (other, b, a.step)):
        if own.step > step and _has_passed_over_reducing(group, ranks[0], other[0] if ranks is side else side[0]):
            return "step behind", f"{capitalize(rank_list(ranks))} launched no bucket in step {step}: {differ}."
    if group.divergence == "names" or continuation.kind == "swapped":
        return "swapped collectives", capitalize(differ) + ", and the reverse nearby: the results are mixed up."
    if continuation.kind == "missing":
        extra, lacks = (side, other) if continuation.missing_on == "second" else (other, side)
        count = "one collective" if continuation.count == 1 else f"{continuation.count} collectives"
        return "missing collective", (
            f"{capitalize(differ)}: from there on {rank_list(lacks)} {plural(lacks, 'is', 'are')} {count} short, or "
            f"{rank_list(extra)} {plural(extra, 'has', 'have')} {count} too many."
        )
    return "different collectives", capitalize(differ) + "."
