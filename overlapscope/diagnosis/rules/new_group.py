"""``new_group``, which all ranks of a job have to call, called by only some of them."""

from __future__ import annotations

from overlapscope.diagnosis.evidence import CallSite
from overlapscope.diagnosis.facts import STUCK_AFTER_NS, Facts, minority
from overlapscope.diagnosis.stacks import waits_for
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import (
    at,
    capitalised,
    collective_text,
    in_step,
    joined,
    loop_step,
    ranks_text,
    verb,
)


def not_called(facts: Facts) -> Verdict | None:
    """A rank waits in ``new_group`` for members that have called it less often, and wait for that rank elsewhere."""
    for rank, one in sorted(facts.ranks.items()):
        calls = {other: each.new_groups for other, each in facts.ranks.items() if each.new_groups is not None}
        if not one.making_group or rank not in calls:
            continue
        waits = {wait.rank: wait for wait in facts.waits if rank in wait.late}
        without = tuple(other for other in sorted(calls) if calls[other] < calls[rank])
        late = tuple(other for other in one.making_group if other in without and other in waits)
        if not late or not all(_stands_still(facts, each) for each in (rank, *late)):
            continue
        called = tuple(other for other in sorted(calls) if calls[other] >= calls[rank])
        wait = waits[late[0]]
        sites: dict[int, CallSite | None] = {rank: one.standing.call_site if one.standing else None}
        sites |= {other: waits[other].entry.call_site for other in late}
        is_inside = all(waits_for(facts.ranks[other].stacks) == "torch.distributed" for other in late)
        return Verdict(
            kind="missing collective",
            sentence=f"Rank {rank} waits in new_group({list(one.making_group)}){at(sites[rank])} for "
            f"{ranks_text(late)}, which {verb(late, 'has', 'have')} not called it and "
            f"{verb(late, 'waits', 'wait')} for rank {rank} in "
            f"{collective_text(wait.entry)}{at(wait.entry.call_site)}{in_step(wait.entry)}.",
            alternative="" if is_inside else f"{ranks_text(late)} may still come to it",
            blamed=minority([called, without], len(facts.world)),
            concerned=tuple(sorted({*called, *without})),
            step=loop_step(wait.entry),
            group=wait.group.name,
            number=wait.entry.number,
            call_sites={each: site for each, site in sorted(sites.items()) if site} or None,
            windows={other: wait.group.windows[other] for other in late[:4]},
            evidence=(
                f"{capitalised(ranks_text(called))} {verb(called, 'has', 'have')} called it, and "
                f"{ranks_text(without)} {verb(without, 'has', 'have')} not: groups are counted on each rank "
                f"({joined([f'{calls[each]} on rank {each}' for each in (rank, late[0])])}).",
            ),
            advice=("Call new_group on all ranks of the job, also on those that are not in the group, in one order.",),
        )
    return None


def _stands_still(facts: Facts, rank: int) -> bool:
    return not facts.is_only_slow(rank) and (facts.ranks[rank].idle_ns or 0) >= STUCK_AFTER_NS
