"""Rule for process groups that ranks make with different lists of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Final

from overlapscope.diagnosis.evidence import CreatedGroup
from overlapscope.diagnosis.texts import collectives as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, find_minority

_CONNECTS_AT_ONCE: Final = "gloo"
"""Backend that connects the ranks of a group when it is made, and not in its first collective."""


def find_unlike_lists(facts: Facts) -> Verdict | None:
    """Find a group to which ranks connect under one name, although they gave different lists of its ranks."""
    for name, given in _by_name(facts).items():
        by_list = _ranks_by_list(given)
        is_mixed_up = any(_is_mixed_up(one, other) for one, other in combinations(by_list.items(), 2))
        if is_mixed_up and _does_harm(facts, given):
            return _verdict(facts, name, given, by_list)
    return None


def _by_name(facts: Facts) -> dict[str, dict[int, CreatedGroup]]:
    """Return what each rank gave, by the name of the group, in the order in which groups were made."""
    found: dict[str, dict[int, CreatedGroup]] = {}
    for rank, one in sorted(facts.ranks.items()):
        for made in one.created_groups:
            found.setdefault(made.name, {})[rank] = made
    return found


def _ranks_by_list(given: Mapping[int, CreatedGroup]) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, made in given.items():
        found.setdefault(made.ranks, []).append(rank)
    return found


def _is_mixed_up(one: tuple[tuple[int, ...], list[int]], other: tuple[tuple[int, ...], list[int]]) -> bool:
    """Return True if a rank that connects, as it is in its own list, meets or waits for one that gave another list.

    Example: rank 2 gave [0, 2] where rank 0 gave [0, 1]: both connect. If rank 1 gave [0, 2], rank 0 waits for it. But
    nobody cares what rank 3 gave, if it is in neither list.
    """
    (a, of_a), (b, of_b) = one, other
    both = {*a, *b}
    return bool(({*of_a} & {*a} and {*of_b} & both) or ({*of_b} & {*b} and {*of_a} & both))


def _does_harm(facts: Facts, given: Mapping[int, CreatedGroup]) -> bool:
    """Return True if the ranks have connected, or if some rank has failed or hangs."""
    if any(made.backend.startswith(_CONNECTS_AT_ONCE) for made in given.values()):
        return True
    has_failed = any(one.failure is not None or one.liveness == "gone" for one in facts.ranks.values())
    return has_failed or any(facts.is_stuck(rank) for rank in facts.blocked)


def _verdict(
    facts: Facts, name: str, given: Mapping[int, CreatedGroup], by_list: Mapping[tuple[int, ...], list[int]]
) -> Verdict:
    lacking = _one_call_short(facts, name, by_list)
    sites = known_sites({rank: made.call_site for rank, made in given.items()})
    return Verdict(
        kind="missing collective" if lacking else "different collectives",
        **text.unlike_lists(name, by_list, sites, lacking),
        blamed=find_minority(by_list.values(), len(given)),
        concerned=tuple(given),
        group=name,
        call_sites=sites,
    )


def _one_call_short(facts: Facts, name: str, by_list: Mapping[tuple[int, ...], list[int]]) -> list[int]:
    """Return the ranks that give now what the others give in their next call; empty if that is not so."""
    if len(by_list) != 2:
        return []
    one, other = by_list.values()
    for lacking, others in ((one, other), (other, one)):
        own, theirs = _lists_since(facts, lacking[0], name), _lists_since(facts, others[0], name)[1:]
        if own and theirs and all(a == b for a, b in zip(own, theirs, strict=False)):
            return lacking
    return []


def _lists_since(facts: Facts, rank: int, name: str) -> list[tuple[int, ...]]:
    made = facts.ranks[rank].created_groups
    first = next(index for index, one in enumerate(made) if one.name == name)
    return [one.ranks for one in made[first:]]
