"""Rule for ``new_group``, which all ranks of a job have to call, called by only some of them."""

from __future__ import annotations

from overlapscope.diagnosis.evidence import CallSite, RankEvidence
from overlapscope.diagnosis.facts import Facts, find_minority
from overlapscope.diagnosis.patience import STUCK_AFTER_NS
from overlapscope.diagnosis.stacks import find_wait_reason
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import (
    at_line,
    capitalize,
    collective_text,
    in_step,
    join_and,
    loop_step,
    plural,
    rank_list,
)


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
