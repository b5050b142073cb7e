"""Remarks: what looks like an oversight in a training loop, and is no fault that anything proves.

They come with any verdict and change none: a job with remarks is as healthy as without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from overlapscope.diagnosis.loop_facts import MicroBatches, RepeatedReductions
from overlapscope.diagnosis.replica_drift import ComparedReplicas
from overlapscope.diagnosis.texts import remarks as text
from overlapscope.diagnosis.verdict import Remark, Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority

_MOST_RANKS: Final = 4
_FEWEST_UPDATES: Final = 3
"""Number of updates from which on a loop does something as a rule."""
_FEWEST_BATCHES: Final = 4
"""Number of batches that have to be compared."""


def find_remarks(facts: Facts, verdict: Verdict) -> tuple[Remark, ...]:
    """Return all remarks on a job, beside its verdict."""
    rules = (_find_not_finite, _find_repeated, _find_unequal_micro_batches, _find_unheld, _find_still, _find_same_data)
    return tuple(chain.from_iterable(rule(facts, verdict) for rule in rules))


def _find_not_finite(facts: Facts, verdict: Verdict) -> Iterator[Remark]:
    """Find gradients that were not finite and did no harm, as under a gradient scaler."""
    if verdict.kind == "not finite":
        return
    for rank, one in sorted(facts.ranks.items())[:_MOST_RANKS]:
        harmless = [each for each in one.non_finite if not each.is_used]
        if harmless:
            words = text.not_used(rank, harmless)
            yield Remark(kind="gradients not finite", sentence=words, ranks=(rank,), step=harmless[0].step)
        for each in one.non_finite:
            if each.is_used and each.last_step is not None:
                words = text.restored(rank, each)
                yield Remark(kind="gradients not finite", sentence=words, ranks=(rank,), step=each.step)


def _find_repeated(facts: Facts, _: Verdict) -> Iterator[Remark]:
    """Find gradients that were reduced although they were averages already."""
    found: dict[tuple[int, str], dict[int, RepeatedReductions]] = {}
    for rank, one in sorted(facts.ranks.items()):
        for repeated in one.loop.repeated:
            if repeated.by == "user" or repeated.updates >= _FEWEST_UPDATES:
                found.setdefault((repeated.model, repeated.by), {})[rank] = repeated
    for by_rank in found.values():
        first = min(by_rank.values(), key=lambda one: one.step)
        yield Remark(
            kind="gradients reduced twice",
            sentence=text.reduced_twice(tuple(by_rank), first),
            ranks=tuple(by_rank),
            step=first.step,
        )


def _find_unequal_micro_batches(facts: Facts, _: Verdict) -> Iterator[Remark]:
    """Find the first update before which ranks had run unequal numbers of backwards."""
    by_model: dict[int, dict[int, MicroBatches]] = {}
    for rank, one in sorted(facts.ranks.items()):
        for counted in one.loop.micro_batches:
            by_model.setdefault(counted.model, {})[rank] = counted
    for model, by_rank in by_model.items():
        found = _find_first_difference(by_rank)
        if found is None:
            continue
        step, counts = found
        sides: dict[int, list[int]] = {}
        for rank, count in counts.items():
            sides.setdefault(count, []).append(rank)
        ordered = sorted(map(tuple, sides.values()), key=lambda ranks: (-len(ranks), ranks))
        yield Remark(
            kind="unequal micro batches",
            sentence=text.unequal_micro_batches(model, step, {count: tuple(of) for count, of in sides.items()}),
            ranks=find_minority(ordered, len(by_rank)) or tuple(by_rank),
            step=step,
        )


def _find_first_difference(by_rank: dict[int, MicroBatches]) -> tuple[int, dict[int, int]] | None:
    """Return the first step in which ranks count unequal numbers, and these; None if there is none."""
    known_from = max(one.changes[0][0] for one in by_rank.values())
    known_to = min(one.last_step for one in by_rank.values())
    moments = {step for one in by_rank.values() for step, _ in one.changes}
    for moment in sorted({known_from, *moments}):
        if known_from <= moment <= known_to:
            counts = {rank: _count_at(one, moment) for rank, one in by_rank.items()}
            if len(set(counts.values())) > 1:
                return moment, counts
    return None


def _count_at(one: MicroBatches, step: int) -> int:
    return [count for since, count in one.changes if since <= step][-1]


def _find_unheld(facts: Facts, _: Verdict) -> Iterator[Remark]:
    """Find parameters that an optimizer updates on some ranks and none on others, unless replicas are the same."""
    for compared in facts.evidence.replicas:
        ranks = [rank for rank in compared.ranks if rank in facts.ranks and _has_updated(facts, rank, compared.model)]
        unheld = {rank: _list_unheld(facts, rank, compared.model) for rank in ranks}
        if len(ranks) < 2 or _are_equal(compared):
            continue
        common = set.intersection(*map(set, unheld.values()))
        for rank in ranks:
            if lacking := tuple(name for name in unheld[rank] if name not in common):
                yield Remark(
                    kind="parameters without optimizer",
                    sentence=text.unheld(rank, lacking),
                    ranks=(rank,),
                    parameters=lacking,
                )


def _has_updated(facts: Facts, rank: int, model: int) -> bool:
    return any(one.model == model for one in facts.ranks[rank].loop.micro_batches)


def _list_unheld(facts: Facts, rank: int, model: int) -> tuple[str, ...]:
    return next((one.names for one in facts.ranks[rank].loop.unheld if one.model == model), ())


def _are_equal(one: ComparedReplicas) -> bool:
    is_at_end = one.at_end is not None and bool(one.at_end.differing)
    return one.latest_step is not None and one.difference is None and one.was_different is None and not is_at_end


def _find_still(facts: Facts, _: Verdict) -> Iterator[Remark]:
    """Find parameters of a rank that do not change any more, while those of other ranks do."""
    for compared in facts.evidence.replicas:
        for one in compared.still:
            yield Remark(
                kind="parameters that stand still",
                sentence=text.stand_still(one, is_since_start=one.is_since_start),
                ranks=(one.rank,),
                step=one.step,
                parameters=one.names,
            )


def _find_same_data(facts: Facts, _: Verdict) -> Iterator[Remark]:
    """Find ranks of one model that were given the same data, in all batches that were looked at."""
    groups = {one.ranks for one in facts.evidence.replicas if not one.is_outside}
    for ranks in sorted(groups):
        hashes = {rank: dict(facts.ranks[rank].loop.batches) for rank in ranks if rank in facts.ranks}
        alike: list[list[int]] = []
        for rank in sorted(hashes):
            side = next((side for side in alike if _are_same_data(hashes[side[0]], hashes[rank])), None)
            if side is None:
                alike.append([rank])
            else:
                side.append(rank)
        for side in alike:
            if len(side) > 1:
                batches = len(set.intersection(*(set(hashes[rank]) for rank in side)))
                yield Remark(kind="same data", sentence=text.same_data(side, batches), ranks=tuple(side))


def _are_same_data(a: dict[int, str], b: dict[int, str]) -> bool:
    """Return True if all batches of two ranks are the same; batches that never change say nothing."""
    common: Sequence[int] = sorted(a.keys() & b.keys())
    is_same = all(a[number] == b[number] for number in common)
    return is_same and len(common) >= _FEWEST_BATCHES and len({a[number] for number in common}) > 1
