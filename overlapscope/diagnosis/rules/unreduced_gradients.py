"""Rule for gradients that the optimizer used although they were never reduced."""

from __future__ import annotations

from overlapscope.diagnosis.texts import replicas as text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority


def find_unreduced_gradients(facts: Facts) -> Verdict | None:
    """Find an optimizer step with gradients that were never averaged with those of the other ranks."""
    steps = {rank: one.unreduced for rank, one in sorted(facts.ranks.items()) if one.unreduced}
    if not steps:
        return None
    ranks, first = tuple(steps), min(steps.values(), key=lambda step: step.step)
    others = [rank for rank in facts.world if rank not in steps]
    return Verdict(
        kind="not reduced",
        **text.unreduced(ranks, first),
        blamed=find_minority((ranks, others), len(facts.world)),
        concerned=ranks,
        step=first.step,
        call_sites={rank: site for rank in ranks[:8] if (site := steps[rank].call_site)} or None,
    )
