"""Rules for collectives that some ranks never entered: left out, or groups entered in different orders (deadlock)."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import CallSite, RankEvidence
from overlapscope.diagnosis.process_state import find_wait_reason
from overlapscope.diagnosis.stall_timeout import STUCK_AFTER_NS
from overlapscope.diagnosis.text import (
    at_line,
    capitalize,
    collective_text,
    group_text,
    in_step,
    is_recreated,
    join_and,
    loop_step,
    plural,
    rank_list,
)
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, Wait, find_minority
from overlapscope.trace.collective_log import FAILED

# Rule for ``new_group``, which all ranks of a job have to call, called by only some of them.


def find_missing_new_group_call(facts: Facts) -> Verdict | None:
    """Find a rank in ``new_group`` that waits for members that have called it less often, and wait for it elsewhere."""
    for rank, one in sorted(facts.ranks.items()):
        waits = {wait.rank: wait for wait in facts.waits if rank in wait.late}
        late = tuple(other for other in facts.awaited_in_new_group(rank) if other in waits)
        # Activity there does not count, as when it polls a file for the others: it can't leave without them.
        has_waited = (one.idle_ns or 0) >= STUCK_AFTER_NS
        if not late or not has_waited or not all(_waits_or_stands_still(facts, other) for other in late):
            continue
        calls = {other: each.new_group_calls for other, each in facts.ranks.items() if each.new_group_calls is not None}
        without = tuple(other for other in sorted(calls) if calls[other] < calls[rank])
        called = tuple(other for other in sorted(calls) if calls[other] >= calls[rank])
        wait = waits[late[0]]
        sites: dict[int, CallSite | None] = {rank: one.position.call_site if one.position else None}
        sites |= {other: waits[other].entry.call_site for other in late}
        is_inside = all(_is_inside(facts.ranks[other]) for other in late)
        return Verdict(
            kind="missing collective",
            sentence=f"Rank {rank} waits in new_group({list(one.creating_group)}){at_line(sites[rank])} for "
            f"{rank_list(late)}, which {plural(late, 'has', 'have')} not called it and "
            f"{plural(late, 'waits', 'wait')} for rank {rank} in "
            f"{collective_text(wait.entry)}{at_line(wait.entry.call_site)}{in_step(wait.entry)}.",
            alternative="" if is_inside else f"{rank_list(late)} may still come to it",
            blamed=find_minority([called, without], len(facts.world)),
            concerned=tuple(sorted({*called, *without})),
            step=loop_step(wait.entry),
            group=wait.group.name,
            number=wait.entry.number,
            call_sites={each: site for each, site in sorted(sites.items()) if site} or None,
            windows={other: wait.group.windows[other] for other in late[:4]},
            evidence=(
                f"{capitalize(rank_list(called))} {plural(called, 'has', 'have')} called it, and "
                f"{rank_list(without)} {plural(without, 'has', 'have')} not: groups are counted on each rank "
                f"({join_and([f'{calls[each]} on rank {each}' for each in (rank, late[0])])}).",
            ),
            advice=("Call new_group on all ranks of the job, also on those that are not in the group, in one order.",),
        )
    return None


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
MISSING_COLLECTIVE_ADVICE: Final = "Look for a collective inside an `if` that depends on the rank or on the data."


def find_interleaved_groups(facts: Facts) -> Verdict | None:
    """Find a cycle of ranks that each wait in a group whose next collective another of them has not reached."""
    waits = _cycle(facts)
    if len({(wait.group.name, wait.is_point_to_point) for wait in waits}) < 2:
        return None
    first = min(waits, key=lambda wait: (wait.entry.step, wait.entry.batch or 0))
    gone_on = tuple(wait.rank for wait in waits if wait.rank in first.late and _is_ahead(facts, wait, first))
    if gone_on:
        return _left_out_verdict(facts, first, gone_on)
    if len({wait.group.name for wait in waits}) == 1:
        return _unanswered_verdict(waits)
    sides: dict[str, list[int]] = {}
    for wait in facts.waits:
        sides.setdefault(wait.group.name, []).append(wait.rank)
    sentences = [
        f"rank {wait.rank} waits in {group_text(wait.group)} ({collective_text(wait.entry)}{at_line(wait.entry.call_site)}) "
        f"for {rank_list(wait.late)}"
        for wait in waits
    ]
    # A rank that is in only one of the groups has no choice where to wait, so it does not count.
    common = set.intersection(*(set(wait.group.ranks) for wait in waits))
    of_both = {name: [rank for rank in ranks if rank in common] for name, ranks in sides.items()}
    return Verdict(
        kind="groups interleaved",
        sentence=f"Ranks have entered process groups in different orders and wait for each other: {join_and(sentences)}.",
        alternative=f"{rank_list(first.late)} may have left out the collective that rank {first.rank} waits in",
        blamed=find_minority(of_both.values(), len(common)),
        concerned=tuple(sorted(wait.rank for wait in waits)),
        step=loop_step(first.entry),
        group=first.group.name,
        number=first.entry.number,
        call_sites={wait.rank: wait.entry.call_site for wait in waits if wait.entry.call_site} or None,
        windows={wait.rank: wait.group.windows[wait.rank] for wait in waits},
        evidence=("Within each group the order is the same on all ranks, as far as they got.",),
        advice=("Launch the collectives of different groups in the same order on all ranks.",),
    )


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
    (peer,) = wait.late
    other = next((one for one in waits if one.rank == peer), None)
    does = "sent" if wait.entry.signature.op == "recv" else "received"
    elsewhere = ""
    if other is not None:
        elsewhere = (
            f": it waits for {rank_list(other.late)} in {collective_text(other.entry)}{at_line(other.entry.call_site)}"
        )
    return Verdict(
        kind="missing collective",
        sentence=f"Rank {wait.rank} waits in {collective_text(wait.entry)}{at_line(wait.entry.call_site)}"
        f"{in_step(wait.entry)}, and rank {peer} has not {does}{elsewhere}.",
        concerned=tuple(sorted(one.rank for one in waits)),
        step=loop_step(wait.entry),
        group=wait.group.name,
        number=wait.entry.number,
        call_sites={one.rank: one.entry.call_site for one in waits if one.entry.call_site} or None,
        windows={one.rank: one.group.windows[one.rank] for one in waits},
        advice=("Give every recv a send on the other side, before either of the two enters a collective.",),
    )


def find_left_out_collective(facts: Facts) -> Verdict | None:
    """Find a collective that failed or does not complete because a rank of its group never entered it and continued."""
    if facts.is_from_dumps:
        return None
    known = facts.ranks.keys() - set(facts.unrecorded)
    for group in facts.evidence.groups:
        latest = {rank: group.latest.get(rank, 0) for rank in group.ranks if rank in known}
        number = min(latest.values(), default=0) + 1
        entries = [(rank, e) for rank, window in group.windows.items() for e in window if e.number == number]
        if not entries or any(e.state == "completed" for _, e in entries):
            continue
        rank, entry = min(entries, key=lambda pair: pair[1].announced_ns)
        late = tuple(other for other, reached in latest.items() if reached < number)
        has_failed = any(e.flags & FAILED for _, e in entries)
        steps = 1 if has_failed else _STEPS_LEFT_BEHIND
        gone_on = tuple(other for other in late if _newest_step(facts, other) >= entry.step + steps)
        if gone_on:
            return _left_out_verdict(facts, Wait(rank, group, entry, late), gone_on)
    return None


def find_recreated_group(facts: Facts) -> Verdict | None:
    """Find ranks that destroyed and recreated the default group, as after an exception, while others did not."""
    for group in facts.evidence.groups:
        made = tuple(rank for rank in group.ranks if group.latest.get(rank))
        others = tuple(rank for rank in group.ranks if rank in facts.ranks and not group.latest.get(rank))
        waits = [wait for wait in facts.waits if wait.group is group and facts.is_stuck(wait.rank)]
        if not (is_recreated(group) and waits and others) or set(others) & set(facts.unrecorded):
            continue
        wait = waits[0]
        still = [rank for rank in others if facts.evidence.is_live and facts.ranks[rank].liveness != "ended"]
        return Verdict(
            kind="missing collective",
            sentence=f"{capitalize(rank_list(made))} {plural(made, 'has', 'have')} called destroy_process_group() and "
            f"init_process_group() again, which {rank_list(others)} {plural(others, 'has', 'have')} not, and "
            f"{plural(made, 'waits', 'wait')}{in_step(wait.entry)} for {plural(others, 'it', 'them')} in "
            f"{collective_text(wait.entry)}{at_line(wait.entry.call_site)}.",
            alternative=f"{rank_list(still)} may still be on the way there" if still else "",
            concerned=tuple(sorted({*made, *others})),
            step=loop_step(wait.entry),
            group=group.name,
            number=wait.entry.number,
            call_sites={one.rank: one.entry.call_site for one in facts.waits if one.entry.call_site} or None,
            windows={rank: group.windows[rank] for rank in made if rank in group.windows},
            advice=(
                "Recover from an exception on all ranks or on none: end the process, and let torchrun restart all.",
            ),
        )
    return None


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
    whom = f"{rank_list(ranks)}, which {plural(ranks, 'has', 'have')} gone on to the next step without it"
    fate = (
        f"which failed because {rank_list(ranks)} never joined it and went on to the next step"
        if missed.flags & FAILED
        else f"and waits there for {whom}"
    )
    return Verdict(
        kind="missing collective",
        sentence=f"{capitalize(in_step(missed).lstrip())} rank {wait.rank} launched {collective_text(missed)}"
        f"{at_line(missed.call_site)} in {group_text(wait.group)}{',' if missed.flags & FAILED else ''} {fate}.",
        alternative=f"the {missed.signature.op} of rank {wait.rank} may be one too many"
        if wait.is_point_to_point
        else "",
        blamed=ranks if len(facts.world) > 2 and (not wait.is_point_to_point or _was_answered_before(wait)) else (),
        concerned=tuple(sorted({wait.rank, *ranks})),
        step=loop_step(missed),
        group=wait.group.name,
        number=missed.number,
        parameters=missed.signature.parameters,
        call_sites={wait.rank: missed.call_site} if missed.call_site else None,
        windows={rank: wait.group.windows[rank] for rank in sorted({wait.rank, *ranks}) if rank in wait.group.windows},
        advice=(MISSING_COLLECTIVE_ADVICE,),
    )
