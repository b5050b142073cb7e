"""Rules for collectives that some ranks never entered: left out, or groups entered in different orders (deadlock)."""

from __future__ import annotations

from typing import Any, Final

from overlapscope.diagnosis.evidence import GroupOrder, RankEvidence
from overlapscope.diagnosis.failures import is_consequence
from overlapscope.diagnosis.messages import find_answer
from overlapscope.diagnosis.process_state import find_wait_reason
from overlapscope.diagnosis.stall_timeout import STUCK_AFTER_NS
from overlapscope.diagnosis.text import is_recreated, loop_step
from overlapscope.diagnosis.texts import collectives as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, Wait, find_minority
from overlapscope.trace.collective_log import FAILED, UNEVEN_INPUTS


def find_missing_new_group_call(facts: Facts) -> Verdict | None:
    """Find a rank in ``new_group`` that waits for members that have called it less often, and wait for it elsewhere.

    All ranks of a job have to call ``new_group``, also those that are not in the group.
    """
    for rank, one in sorted(facts.ranks.items()):
        waits = {wait.rank: wait for wait in facts.waits if rank in wait.late}
        late = tuple(other for other in facts.awaited_in_new_group(rank) if other in waits)
        # Activity there does not count, as when it polls a file for the others: it can't leave without them.
        has_waited = (one.idle_ns or 0) >= STUCK_AFTER_NS
        if late and has_waited and all(_waits_or_stands_still(facts, other) for other in late):
            return _new_group_verdict(facts, one, [waits[other] for other in late])
    return None


def _new_group_verdict(facts: Facts, one: RankEvidence, waits: list[Wait]) -> Verdict:
    """Return the verdict of a rank in ``new_group``, given what the ranks that have not called it wait in."""
    counts = {rank: other.new_group_calls for rank, other in sorted(facts.ranks.items())}
    calls = {rank: count for rank, count in counts.items() if count is not None}
    without = [rank for rank in calls if calls[rank] < calls[one.rank]]
    sites = {one.rank: one.position.call_site if one.position else None}
    sites |= {wait.rank: wait.entry.call_site for wait in waits}
    late, wait = [wait.rank for wait in waits], waits[0]
    is_inside = all(_is_inside(facts.ranks[rank]) for rank in late)
    return Verdict(
        kind="missing collective",
        **text.new_group_not_called(one, wait, late, calls, is_inside=is_inside),
        blamed=find_minority([calls.keys() - without, without], len(facts.world)),
        concerned=tuple(calls),
        step=loop_step(wait.entry),
        group=wait.group.name,
        number=wait.entry.number,
        call_sites=known_sites(sites),
        windows=wait.group.windows_of(late[:4]),
    )


def _is_inside(one: RankEvidence) -> bool:
    return find_wait_reason(one.stacks) == "torch.distributed"


def _waits_or_stands_still(facts: Facts, rank: int) -> bool:
    """Return True if a rank with an incomplete collective does nothing else, so that it can't reach ``new_group``.

    If its main thread waits, the duration does not matter: the alarm is raised by the first rank that has waited for
    long, and the watchdogs of others may notice the stall a little later.
    """
    one = facts.ranks[rank]
    waits = _is_inside(one) or (one.position is not None and one.position.phase == "finalize")
    return not facts.is_only_slow(rank) and (waits or (one.idle_ns or 0) >= STUCK_AFTER_NS)


_STEPS_LEFT_BEHIND: Final = 2
"""Steps of grace: a collective of the previous step may still be about to be launched, as by another thread."""


def find_interleaved_groups(facts: Facts) -> Verdict | None:
    """Find a cycle of ranks that each wait in a group whose next collective another of them has not reached.

    Or for a message that another of them has not sent or received.
    """
    waits = _cycle(facts)
    if waits and all(wait.is_point_to_point for wait in waits):
        return _message_cycle_verdict(facts, waits)
    if len({(wait.group.name, wait.is_point_to_point) for wait in waits}) < 2:
        return None
    first = min(waits, key=lambda wait: (wait.entry.step, wait.entry.batch or 0))
    gone_on = tuple(wait.rank for wait in waits if wait.rank in first.late and _is_ahead(facts, wait, first))
    if gone_on:
        return _left_out_verdict(facts, first, gone_on)
    if any(wait.is_point_to_point for wait in waits):
        return _unanswered_verdict(waits)
    return Verdict(
        kind="groups interleaved",
        **text.groups_interleaved(waits, first),
        blamed=_minority_of_groups(facts, waits),
        **_wait_fields(first, waits),
    )


def _message_cycle_verdict(facts: Facts, waits: list[Wait]) -> Verdict | None:
    """Return the verdict on ranks that each wait for a message of the next one; None if one of them may be computing.

    A rank may have launched a message without waiting for it. It does if it has failed there, or is inside torch.
    """
    still = [wait.rank for wait in waits if not is_consequence(facts.ranks[wait.rank].failure)]
    if len(waits) < 2 or any(facts.is_only_slow(rank) for rank in still):
        return None
    elsewhere = [rank for rank in still if not _is_inside(facts.ranks[rank])]
    first = min(waits, key=lambda wait: (wait.entry.step, wait.rank))
    return Verdict(
        kind="missing collective",
        **text.message_cycle(waits, elsewhere, tags=_tags_between(waits)),
        **_wait_fields(first, waits) | {"windows": {}},
    )


def _tags_between(waits: list[Wait]) -> tuple[int, int] | None:
    """Return the tags of a send and a recv of two ranks that match but for these; None if they don't match anyway."""
    if len(waits) != 2:
        return None
    one, other = (wait.entry.signature for wait in waits)
    return (one.tag, other.tag) if one.op != other.op and one.tag != other.tag else None


def _wait_fields(first: Wait, waits: list[Wait]) -> dict[str, Any]:
    """Return the fields of a verdict that identify where ranks wait for each other."""
    return {
        "concerned": tuple(sorted(wait.rank for wait in waits)),
        "step": loop_step(first.entry),
        "group": first.group.name,
        "number": first.entry.number,
        "call_sites": known_sites({wait.rank: wait.entry.call_site for wait in waits}),
        "windows": {wait.rank: wait.group.windows[wait.rank] for wait in waits},
    }


def _minority_of_groups(facts: Facts, waits: list[Wait]) -> tuple[int, ...]:
    """Return the ranks that wait in another group than most.

    A rank that is in only one of the groups has no choice where to wait, so it does not count.
    """
    common = set.intersection(*(set(wait.group.ranks) for wait in waits))
    sides: dict[str, list[int]] = {}
    for wait in facts.waits:
        if wait.rank in common:
            sides.setdefault(wait.group.name, []).append(wait.rank)
    return find_minority(sides.values(), len(common))


def _is_ahead(facts: Facts, wait: Wait, first: Wait) -> bool:
    """Return True if a rank waits in a later step, or at a later batch after a batch that both had reached together."""
    if wait.entry.step != first.entry.step or wait.entry.batch is None or first.entry.batch is None:
        return wait.entry.step > first.entry.step
    for group in facts.evidence.groups:
        batches = [{entry.number: entry.batch for entry in group.windows.get(one.rank, ())} for one in (wait, first)]
        if common := batches[0].keys() & batches[1].keys():
            latest = max(common)
            return batches[0][latest] == batches[1][latest] and wait.entry.batch > first.entry.batch
    return False


def _unanswered_verdict(waits: list[Wait]) -> Verdict:
    """Return the verdict of a send or a recv whose peer waits in something else of the same group."""
    wait = next(one for one in waits if one.is_point_to_point)
    other = next((one for one in waits if one.rank in wait.late), None)
    fields = _wait_fields(wait, waits)
    fields["concerned"] = tuple(sorted({*fields["concerned"], *wait.late}))
    return Verdict(kind="missing collective", **text.unanswered(wait, other), **fields)


def find_oversized_message(facts: Facts) -> Verdict | None:
    """Find a recv that never completes because its peer sends more than it expects: gloo ends the process then."""
    for rank, (group, entry) in sorted(facts.blocked.items()):
        sent = find_answer(group, rank, entry) if entry.signature.op == "recv" else None
        if sent is not None and sent.signature.bytes > entry.signature.bytes and entry.signature.peer is not None:
            peer = entry.signature.peer
            return Verdict(
                kind="different collectives",
                **text.oversized_message(rank, entry, peer, sent),
                concerned=tuple(sorted((rank, peer))),
                step=loop_step(entry),
                group=group.name,
                call_sites=known_sites({rank: entry.call_site, peer: sent.call_site}),
            )
    return None


def find_left_out_collective(facts: Facts) -> Verdict | None:
    """Find a collective that failed or does not complete because a rank of its group never entered it and continued."""
    if facts.is_from_dumps:
        return None
    return next((found for group in facts.evidence.groups if (found := _left_out_of(facts, group))), None)


def _left_out_of(facts: Facts, group: GroupOrder) -> Verdict | None:
    latest = facts.latest_numbers(group, without=facts.unrecorded)
    number = min(latest.values(), default=0) + 1
    entries = group.entries_at(number)
    if not entries or any(entry.state == "completed" for entry in entries.values()):
        return None
    first = min(entries, key=lambda rank: entries[rank].announced_ns)
    if entries[first].flags & UNEVEN_INPUTS:  # each rank counts steps of its own
        return None
    late = tuple(rank for rank, reached in latest.items() if reached < number)
    steps = 1 if any(entry.flags & FAILED for entry in entries.values()) else _STEPS_LEFT_BEHIND
    gone_on = tuple(rank for rank in late if _newest_step(facts, rank) >= entries[first].step + steps)
    return _left_out_verdict(facts, Wait(first, group, entries[first], late), gone_on) if gone_on else None


def find_recreated_group(facts: Facts) -> Verdict | None:
    """Find ranks that destroyed and recreated the default group, as after an exception, while others did not."""
    for group in facts.evidence.groups:
        others = [rank for rank, latest in facts.latest_numbers(group).items() if not latest]
        if not is_recreated(group) or not others or set(others) & set(facts.unrecorded):
            continue
        if _have_called_again(facts, group, others):
            continue
        waits = (wait for wait in facts.waits if wait.group is group and facts.is_stuck(wait.rank))
        if (wait := next(waits, None)) is not None:
            return _recreated_verdict(facts, wait, others)
    return None


def _have_called_again(facts: Facts, group: GroupOrder, others: list[int]) -> bool:
    """Return True if some without an entry have called ``init_process_group`` as often as those with one."""
    calls = max((facts.ranks[rank].init_calls for rank in group.latest if rank in facts.ranks), default=1)
    return calls > 1 and any(facts.ranks[rank].init_calls >= calls for rank in others)


def _recreated_verdict(facts: Facts, wait: Wait, others: list[int]) -> Verdict:
    group = wait.group
    made = [rank for rank in group.ranks if group.latest.get(rank)]
    still = [rank for rank in others if facts.evidence.is_live and facts.ranks[rank].liveness != "ended"]
    return Verdict(
        kind="missing collective",
        **text.group_recreated(wait, made, others, still),
        concerned=tuple(sorted({*made, *others})),
        step=loop_step(wait.entry),
        group=group.name,
        number=wait.entry.number,
        call_sites=known_sites({one.rank: one.entry.call_site for one in facts.waits}),
        windows=group.windows_of(made),
    )


def _newest_step(facts: Facts, rank: int) -> int:
    entries = [entry for group in facts.evidence.groups if (entry := facts.latest(group, rank)) is not None]
    return max((entry.step for entry in entries), default=0)


def _cycle(facts: Facts) -> list[Wait]:
    """Return a cycle of ranks that each wait for the next one.

    Example: 0 waits for 1, 1 for 2 and 2 for 1: the path 0, 1, 2 returns to 1, so the cycle is 1, 2.
    """
    if facts.awaited or not any(facts.is_stuck(rank) for rank in facts.waiting):
        return []
    by_rank = {wait.rank: wait for wait in facts.waits}
    path: list[int] = []
    rank = min(by_rank, default=None)
    while rank is not None and rank not in path:
        path.append(rank)
        rank = next((late for late in by_rank[rank].late if late in by_rank), None)
    return [] if rank is None else [by_rank[one] for one in path[path.index(rank) :]]


def _was_answered_before(wait: Wait) -> bool:
    """Return True if a send or a recv is one of several, so that the peer is more likely to have left one out."""
    op, peer = wait.entry.signature.op, wait.entry.signature.peer
    return any(
        entry.signature.op == op and entry.signature.peer == peer and entry.state == "completed"
        for entry in wait.group.windows[wait.rank]
    )


def _left_out_verdict(facts: Facts, wait: Wait, ranks: tuple[int, ...]) -> Verdict:
    """Return the verdict that ranks are in a later step although others still wait for them in an earlier one."""
    missed = wait.first_missed_by(ranks)
    return Verdict(
        kind="missing collective",
        **text.left_out(wait, missed, ranks, has_failed=bool(missed.flags & FAILED)),
        blamed=ranks if len(facts.world) > 2 and (not wait.is_point_to_point or _was_answered_before(wait)) else (),
        concerned=tuple(sorted({wait.rank, *ranks})),
        step=loop_step(missed),
        group=wait.group.name,
        number=missed.number,
        parameters=missed.signature.parameters,
        call_sites=known_sites({wait.rank: missed.call_site}),
        windows=wait.group.windows_of((wait.rank, *ranks)),
    )
