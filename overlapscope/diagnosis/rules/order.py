"""Rule for ranks whose collectives differ, or are in a different order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final, Literal

from overlapscope.diagnosis.evidence import UNKNOWN_OP, CallSite, CaughtError, Entry, GroupOrder
from overlapscope.diagnosis.rules import caught, replicas
from overlapscope.diagnosis.text import loop_step
from overlapscope.diagnosis.texts import collectives as text
from overlapscope.diagnosis.texts.collectives import Divergence, Side
from overlapscope.diagnosis.verdict import FaultKind, Verdict, VerdictText, known_sites
from overlapscope.diagnosis.wait_graph import Facts, find_minority
from overlapscope.trace.schema import NO_BUCKET

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
_ENOUGH_BATCHES: Final = 8
"""Number of steps from which their share in a rank's batches says how many batches a step takes."""
_ENOUGH_TURNS: Final = 3
"""Number of equal distances from which it is known that a rank launches something every N steps."""
_ENOUGH_STEPS: Final = 2
"""Number of whole steps from which it is known what ranks do in each step."""


def find_divergence(facts: Facts) -> Verdict | None:
    """Find the first entry of any group that is not the same on all ranks."""
    differing = [group for group in facts.evidence.groups if group.first_divergence is not None]
    group = min(differing, key=_divergence_sort_key, default=None)
    if group is None or (number := group.first_divergence) is None:
        return None
    at_number = _known_at(group, number)
    sides = _sides(group, at_number)
    if len(sides) < 2:
        return None
    blamed = find_minority(sides, len(group.ranks))
    side, other = (Side(ranks, at_number[ranks[0]]) for ranks in _two_sides(sides, blamed))
    a, b = side.entry, other.entry
    if (unreduced := _find_side_without_reductions(facts, group, sides, at_number)) is not None:
        return unreduced
    divergence = Divergence(group, number, side, other)
    kind, words, lacking = _classify_divergence(divergence)
    step = loop_step(min(a, b, key=lambda entry: entry.loop_step))
    blamed, words = _choose_blamed(facts, divergence, sides, blamed, words, step)
    blamed, words = _weigh_majority(divergence, sides, blamed, words, lacking)
    if group.predates_log:
        words["alternative"] = text.FIRST_IS_LOST
    concerned = tuple(sorted(chain.from_iterable(sides)))
    some = sorted({*blamed[:_MOST_SHOWN], side.ranks[0], other.ranks[0]})
    shown = concerned if len(concerned) <= _MOST_SHOWN else some
    sites = {rank: entry.call_site for rank, entry in at_number.items()} | _first_lines(divergence)
    return Verdict(
        kind=kind,
        **words,
        blamed=blamed,
        concerned=concerned,
        step=None if group.predates_log else step,
        last_step=step if group.predates_log else None,
        group=group.name,
        number=number,
        bucket=_bucket_of(a, b),
        parameters=a.signature.parameters or b.signature.parameters,
        call_sites=known_sites({rank: sites.get(rank) for rank in shown}),
        windows=group.windows_of(shown),
    )


def _choose_blamed(
    facts: Facts,
    found: Divergence,
    sides: list[list[int]],
    minority: tuple[int, ...],
    words: VerdictText,
    step: int | None,
) -> tuple[tuple[int, ...], VerdictText]:
    """Return whom to blame, and the texts: the minority, or of equal sides the one after an exception."""
    errors = {} if minority else _find_errors_of_a_side(facts, found, sides, step)
    after = tuple(errors)
    if after:
        words["alternative"] = text.exception_is_unrelated(after)
        words["sentence"] += " " + caught.describe(facts, after[0], errors[after[0]])
    notes = tuple(_divergence_notes(facts, found, sides, has_majority=bool(minority or after)))
    return minority or after, {**words, "evidence": notes}


def _known_at(group: GroupOrder, number: int) -> dict[int, Entry]:
    """Return the entries with this number, without those of which nobody knows what they were."""
    found = group.entries_at(number)
    return {rank: entry for rank, entry in found.items() if entry.signature.op != UNKNOWN_OP}


def _bucket_of(*entries: Entry) -> int | None:
    return next((entry.signature.bucket for entry in entries if entry.signature.bucket != NO_BUCKET), None)


def _divergence_notes(facts: Facts, found: Divergence, sides: list[list[int]], *, has_majority: bool) -> Iterator[str]:
    """Yield what else is known of a divergence."""
    group, number, side, other = found.group, found.number, found.side, found.other
    at_number = group.entries_at(group.first_divergence)
    if group.predates_log:
        yield text.oldest_left() if _is_oldest_entry(group, number) else text.apart_before()
    if absent := [rank for rank in group.ranks if rank not in at_number]:
        yield text.not_compared(number, absent)
    step = min(side.entry.step, other.entry.step)
    if unreduced := [rank for rank in at_number if _is_in_no_sync(facts, rank, step)]:
        yield text.under_no_sync(unreduced)
    if already := _first_call_site_difference(found):
        yield text.lines_differ(already[0].number, _first_lines(found))
    for one, opposite in ((side, other), (other, side)):
        if _begins_another_forward(one.entry, opposite.entry):
            yield text.began_forward(one.ranks)
    if _have_batches_diverged(group, sides):
        yield text.batches_reached(Side(ranks, at_number[ranks[0]]) for ranks in sides)
    if not has_majority:
        yield text.NO_MAJORITY


def _is_oldest_entry(group: GroupOrder, number: int) -> bool:
    return all(entry.number >= number for window in group.windows.values() for entry in window)


def _find_broken_turn(group: GroupOrder, side: Side) -> int:
    """Return every how many steps a side has launched this, if it comes a step too soon now; else 0."""
    steps = (*group.steps_before.get(side.ranks[0], ()), side.entry.step)
    *before, latest = (b - a for a, b in pairwise(steps)) if len(steps) > _ENOUGH_TURNS else (0,)
    return latest + 1 if set(before) == {latest + 1} else 0


def _find_errors_of_a_side(
    facts: Facts, found: Divergence, sides: list[list[int]], step: int | None
) -> dict[int, CaughtError]:
    """Return what the ranks of one side have caught just before the difference, if all of them have and no others."""
    launched = found.group.entries_at(found.number)
    ranks = [rank for side in sides for rank in side]
    errors = {rank: error for rank in ranks if (error := caught.find_before(facts, rank, launched[rank], step))}
    return errors if sorted(errors) in [sorted(side) for side in sides] else {}


def _find_side_without_reductions(
    facts: Facts, group: GroupOrder, sides: list[list[int]], at_number: Mapping[int, Entry]
) -> Verdict | None:
    """Return a verdict if one side has updated without reducing: it is at another batch, or where others reduce."""
    found = replicas.find_unreduced_gradients(facts)
    if found is None or found.step is None or not _is_side(facts, found.concerned, sides, at_number):
        return None
    others = [rank for side in sides for rank in side if rank not in found.concerned]
    if group.divergence == "batch":
        step = min(entry.step for entry in at_number.values())
        note = text.at_another_batch(found.concerned) if found.step == step else ""
    else:
        note = _describe_awaited_bucket(others, at_number, found.step)
    if not note or group.divergence == "names":
        return None
    return replace(
        found,
        group=group.name,
        number=group.first_divergence,
        windows=group.windows_of(rank for ranks in sides for rank in ranks[:_MOST_SHOWN]),
        evidence=(*found.evidence, note),
    )


def _describe_awaited_bucket(ranks: Sequence[int], at_number: Mapping[int, Entry], step: int) -> str:
    """Return which bucket ranks launch in this step or later; empty if they don't."""
    buckets = [at_number[rank] for rank in ranks if at_number[rank].signature.bucket != NO_BUCKET]
    is_since = bool(buckets) and min(one.step for one in buckets) >= step
    return text.others_launch_bucket(ranks, buckets[0]) if is_since else ""


def _is_side(facts: Facts, ranks: Sequence[int], sides: list[list[int]], at_number: Mapping[int, Entry]) -> bool:
    """Return True if these ranks are a side, unless they left one reduction out under ``no_sync()`` and go on."""
    unreduced = [one for rank in ranks for one in facts.ranks[rank].unreduced]
    launches = any(rank in at_number and at_number[rank].signature.bucket != NO_BUCKET for rank in ranks)
    goes_on = launches and all(one.cause == "no_sync" for one in unreduced)
    return not goes_on and any({*side} == {*ranks} for side in sides)


def _begins_another_forward(one: Entry, other: Entry) -> bool:
    """Return True if an entry begins a forward while another rank is in the backward of the same step."""
    return one.signature.role == "buffers" and other.signature.bucket != NO_BUCKET and one.step == other.step


def _have_batches_diverged(group: GroupOrder, sides: list[list[int]]) -> bool:
    """Return True if the sides are unequally far in their data since a common collective."""
    if group.divergence == "batch" or len(offsets := _batch_offsets(group)) < sum(map(len, sides)):
        return False
    ahead = [{offsets[rank] for rank in side} for side in sides]
    is_alike = all(len(one) == 1 for one in ahead) and len(set().union(*ahead)) == len(sides)
    return is_alike and len({entry.batch for entry in group.entries_at(group.first_divergence).values()}) > 1


def _first_call_site_difference(found: Divergence) -> tuple[Entry, Entry] | None:
    """Return the first common entry that two ranks launched at different lines, if all later ones differ as well."""
    windows = (found.group.windows[side.ranks[0]] for side in (found.side, found.other))
    of_a, of_b = ({entry.number: entry for entry in window if entry.number < found.number} for window in windows)
    common = sorted(of_a.keys() & of_b.keys())
    differing = [one for one in common if of_a[one].call_site != of_b[one].call_site]
    if not differing or differing[0] == common[0] or differing != common[common.index(differing[0]) :]:
        return None
    return of_a[differing[0]], of_b[differing[0]]


def _first_lines(found: Divergence) -> dict[int, CallSite]:
    """Return the lines of the first common entry that two ranks launched at different lines, if known."""
    already = _first_call_site_difference(found) or ()
    sides = (found.side.ranks[0], found.other.ranks[0])
    return {rank: entry.call_site for rank, entry in zip(sides, already, strict=False) if entry.call_site}


def _is_in_no_sync(facts: Facts, rank: int, step: int) -> bool:
    """Return True if a rank has gone through a step without reducing anything, and has not reduced since."""
    one = facts.ranks.get(rank)
    return one is not None and one.no_sync_since is not None and one.no_sync_since <= step < one.steps_done


def _divergence_sort_key(group: GroupOrder) -> tuple[int, int, int]:
    number = group.first_divergence or 0
    entries = group.entries_at(number).values()
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
    own, theirs = (group.entries_at(number)[one] for one in (rank, other))
    is_reducing = theirs.signature.is_gradient_reduction and own.signature.bucket == NO_BUCKET
    has_passed_over = not _has_reduced(group, rank, theirs.step, number)
    return is_reducing and has_passed_over and _reaches_back(group, rank, theirs.step)


def _batch_offsets(group: GroupOrder) -> dict[int, int]:
    """Return how far each rank's batch advanced to the first difference, since an entry at which all batches are known.

    Example: batches 7, 8, 9 on rank 0 and 0, 1, 3 on rank 1 at numbers 4, 5 and 6, the first of another step, differ at
    6: since 5 they advanced by 1 and 2.
    """
    number = group.first_divergence or 0
    with_batch = {rank: _entries_with_batch(window) for rank, window in group.windows.items()}
    known = {rank: entries for rank, entries in with_batch.items() if number in entries}
    before = [one for one in set.intersection(*map(set, known.values())) if one < number] if known else []
    if not before:
        return {}
    since = max([one for one in before if _is_in_earlier_step(known.values(), one, number)] or before)
    return {rank: (entries[number].batch or 0) - (entries[since].batch or 0) for rank, entries in known.items()}


def _is_in_earlier_step(ranks: Iterable[dict[int, Entry]], one: int, number: int) -> bool:
    return all(entries[one].step < entries[number].step for entries in ranks)


def _side_that_departs(found: Divergence) -> Side | None:
    """Return the side that does not go on in its data as before; None if both or none do."""
    sides = [one for one in (found.side, found.other) if not _advances_as_before(found.group, one.ranks[0])]
    return sides[0] if len(sides) == 1 else None


def _advances_as_before(group: GroupOrder, rank: int) -> bool:
    """Return True if a rank has got as far in its data since the step before as it had from the one before that."""
    since, usual = _count_batches(group, rank)
    return since == usual


def _count_batches(group: GroupOrder, rank: int) -> tuple[int, int]:
    """Return how many batches a rank has had since the step before the first difference, and how many are usual.

    They are equal where that is unknown.
    """
    number = group.first_divergence or 0
    of_step = {
        entry.step: entry.batch or 0
        for entry in _entries_with_batch(group.windows[rank]).values()
        if entry.number <= number
    }
    *before, latest = of_step.values() if of_step else (0,)
    if len(before) > 1:
        return latest - before[-1], before[-1] - before[-2]
    last_step = [*of_step][-2] if before else 0
    if last_step < _ENOUGH_BATCHES:
        return 0, 0
    # It has made about as many updates as it has had batches.
    return latest - before[-1], round(before[-1] / last_step)


def _entries_with_batch(window: Sequence[Entry]) -> dict[int, Entry]:
    return {entry.number: entry for entry in window if entry.batch is not None}


def _two_sides(sides: list[list[int]], blamed: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return a side without blamed ranks, and the first of the others."""
    ordered = sorted(sides, key=lambda ranks: (bool(set(ranks) & set(blamed)), ranks))
    return ordered[0], ordered[1]


def _weigh_majority(
    found: Divergence, sides: list[list[int]], minority: tuple[int, ...], words: VerdictText, lacking: Side | None
) -> tuple[tuple[int, ...], VerdictText]:
    """Return whom to blame, and the texts: the majority if it is wrong, though that is only likely, or nobody."""
    if not minority:
        return minority, words
    if lacking is None or not _is_majority_wrong(found, minority, lacking):
        doubt = _doubt_majority(found)
        return (() if doubt else minority), {**words, "evidence": (*words["evidence"], *filter(None, [doubt]))}
    majority = tuple(sorted(set(chain.from_iterable(sides)) - set(minority)))
    evidence = (*words["evidence"], text.was_usual(lacking))
    return majority, {**words, "alternative": text.ALL_WERE_TO_LEAVE_IT_OUT, "evidence": evidence}


def _doubt_majority(found: Divergence) -> str:
    """Say why most ranks may have left out an update, though nothing shows it; empty if the others may as well."""
    group, side, other = found.group, found.side, found.other
    usual = _find_broken_turn(group, side)
    if usual and not _find_broken_turn(group, other):
        return text.most_are_out_of_turn(side, usual)
    since, usual = _count_batches(group, side.ranks[0])
    theirs, as_usual = _count_batches(group, other.ranks[0])
    return text.most_have_more_batches(side, since, usual) if usual < since and theirs <= as_usual else ""


def _is_majority_wrong(found: Divergence, minority: Sequence[int], lacking: Side) -> bool:
    """Return True if most ranks have left out what each of them did in every step before, as far as known.

    Who goes on as before is not to blame for what the others leave out.
    """
    if set(lacking.ranks) & set(minority):
        return False
    if found.group.divergence == "batch":
        return True
    opposite = found.other if lacking is found.side else found.side
    return all(_does_in_each_step(found, rank, opposite.entry.signature.hash) for rank in lacking.ranks)


def _does_in_each_step(found: Divergence, rank: int, signature: int) -> bool:
    """Return True if a rank launched this in each of several steps before the first difference."""
    before = [entry for entry in found.group.windows[rank] if entry.number < found.number]
    of_reductions = {entry.signature.hash for entry in before if entry.signature.is_gradient_reduction}
    if signature in of_reductions:
        return True  # of a bucket, which each step reduces
    step = min(found.side.entry.step, found.other.entry.step)
    steps = sorted({entry.step for entry in before} - {step})[1:]  # the first may be cut off
    usual = {entry.step for entry in before if entry.signature.hash == signature}
    return len(steps) >= _ENOUGH_STEPS and set(steps) <= usual


def _classify_divergence(found: Divergence) -> tuple[FaultKind, VerdictText, Side | None]:
    """Return the kind of a difference, its texts, and the side that has left something out, if that is clear."""
    group, side, other = found.group, found.side, found.other
    if group.divergence == "step":
        return _classify_steps(found)
    if group.divergence == "batch":
        return "batch skipped", text.at_different_batches(found), _side_that_departs(found)
    for one, opposite in ((side, other), (other, side)):
        step = opposite.entry.step
        if one.entry.step > step and _has_passed_over_reducing(group, one.ranks[0], opposite.ranks[0]):
            return "step behind", text.launched_no_bucket(found, one.ranks, step), one
    following = (
        [entry for entry in group.windows[each.ranks[0]] if entry.number >= found.number] for each in (side, other)
    )
    continuation = explain_continuation(*following)
    if group.divergence == "names" or continuation.kind == "swapped":
        return "swapped collectives", text.swapped(found), None
    if continuation.kind == "missing":
        extra, lacking = (side, other) if continuation.missing_on == "second" else (other, side)
        return "missing collective", text.missing(found, extra, lacking, continuation.count), lacking
    return "different collectives", text.different(found), None


def _classify_steps(found: Divergence) -> tuple[FaultKind, VerdictText, Side | None]:
    """Classify the same collective, launched in different steps."""
    ahead, behind = found.by_step
    if found.side.entry.signature.bucket == NO_BUCKET:
        return "missing collective", text.skipped(found), ahead
    if _has_reduced(found.group, ahead.ranks[0], behind.entry.step, found.number):
        return "step behind", text.reduced_again(found), None
    if not _reaches_back(found.group, ahead.ranks[0], behind.entry.step):
        return "step behind", text.in_different_steps(found), None
    return "step behind", text.skipped_step(found), ahead
