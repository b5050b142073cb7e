"""Rule for gradients that the optimizer used although they were never reduced."""

from __future__ import annotations

from overlapscope.diagnosis.text import at_line, capitalize, rank_list
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority


def find_unreduced_gradients(facts: Facts) -> Verdict | None:
    """Find an optimizer step with gradients that were never averaged with those of the other ranks."""
    ranks = tuple(rank for rank, one in sorted(facts.ranks.items()) if one.unreduced)
    if not ranks:
        return None
    first = min(ranks, key=lambda rank: facts.ranks[rank].unreduced.step)  # type: ignore[union-attr]
    unreduced = facts.ranks[first].unreduced
    assert unreduced is not None
    others = [rank for rank in facts.world if rank not in ranks]
    sites = {rank: u.call_site for rank in ranks[:8] if (u := facts.ranks[rank].unreduced) and u.call_site}
    return Verdict(
        kind="not reduced",
        sentence=f"{capitalize(rank_list(ranks))} stepped the optimizer in step {unreduced.step} with gradients that "
        f"were never reduced{f', from a backward{at_line(unreduced.call_site)}' if unreduced.call_site else ''}, so the "
        "replicas drift apart.",
        blamed=find_minority((ranks, others), len(facts.world)),
        concerned=ranks,
        step=unreduced.step,
        call_sites=sites or None,
        evidence=(f"Gradients of model {unreduced.model} were accumulated, but none of its buckets was launched.",),
        advice=("Call the DDP object itself, not its .module; run the last backward outside no_sync().",),
    )
