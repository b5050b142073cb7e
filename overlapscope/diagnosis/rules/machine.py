"""What the machine said of the ranks of a verdict: evidence beside it, which no verdict rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from overlapscope.diagnosis.texts import machine as text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.machine.conditions import KIND_OF, Condition
from overlapscope.machine.evidence import MachineEvidence, contrast, select_telling
from overlapscope.trace.machine_facts import CONTROL_GROUP, GPU, HOST, INFINIBAND, INTERFACE, PROCESS, source_kind

_SOURCES: Final = {
    **dict.fromkeys(("slow", "stuck", "waits for data", "holds the GIL"), (GPU, CONTROL_GROUP, PROCESS, HOST)),
    **dict.fromkeys(("killed", "out of memory"), (CONTROL_GROUP, HOST)),
}
"""Kinds of sources that have something to do with a kind of verdict."""
_MEMORY: Final = ("near the memory limit", "memory limit", "memory pressure", "host memory pressure", "swapping")
_NETWORK: Final = (INTERFACE, INFINIBAND)
_MOST_GRAVE: Final = 4


def note_conditions(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return the machine's part in a verdict: what was grave on any rank, and what sets the named ranks apart.

    What all ranks were under alike is told only of ranks that are named for being slow.
    """
    uses = {rank: one.machine.uses for rank, one in facts.ranks.items()}
    grave = list(_find_grave(facts, uses))[:_MOST_GRAVE]
    if not verdict.is_fault and verdict.kind != "slow":
        return tuple(text.grave(one) for one in grave)
    ranks = verdict.named or verdict.concerned
    recent = _by_source(one for rank in facts.ranks.values() for one in rank.machine.recent)
    related = [one for one in contrast(recent, uses, ranks) if _is_related(one.condition, verdict)]
    told = select_telling(related) or tuple(related[:1] if verdict.named else ())
    return (*(text.grave(one) for one in grave), *(text.recent(one) for one in told))


def _find_grave(facts: Facts, uses: dict[int, tuple[str, ...]]) -> Iterator[MachineEvidence]:
    """Yield what is worth a word whatever happened, of each source once: several ranks may have seen it."""
    found: dict[tuple[str, str], Condition] = {}
    for condition in (one for rank in facts.ranks.values() for one in rank.machine.grave):
        known = found.setdefault((condition.source, condition.kind), condition)
        if condition.amount > known.amount:
            found[condition.source, condition.kind] = condition
    for condition in found.values():
        ranks = tuple(rank for rank, sources in uses.items() if condition.source in sources)
        yield MachineEvidence(ranks=ranks, condition=condition, others=None, shared_with=())


def _by_source(conditions: Iterator[Condition]) -> dict[str, Sequence[Condition]]:
    found: dict[str, list[Condition]] = {}
    for condition in conditions:
        found.setdefault(condition.source, []).append(condition)
    return {source: tuple(own) for source, own in found.items()}


def _is_related(condition: Condition, verdict: Verdict) -> bool:
    if KIND_OF[condition.kind].is_grave:  # told already
        return False
    kind = source_kind(condition.source)
    if verdict.kind in ("killed", "out of memory") and condition.kind not in _MEMORY:
        return False
    is_of_network = kind in _NETWORK and verdict.kind in ("stuck", "failed", "slow")
    return kind in _SOURCES.get(verdict.kind, ()) or is_of_network
