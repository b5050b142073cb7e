"""Rule for gradients that were not finite (NaN or infinite) on some ranks, and got into the weights of all."""

from __future__ import annotations

from collections.abc import Iterator

from overlapscope.diagnosis.evidence import NonFiniteGradients
from overlapscope.diagnosis.texts import finite as text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts


def find_non_finite_weights(facts: Facts) -> Verdict | None:
    """Find the first update since which weights are not finite, and the ranks whose gradients it used."""
    found = [(_update_of(one), one.model) for _, one in _episodes(facts) if one.is_used and one.last_step is None]
    if not found or _was_wrong_before(facts, min(found)[0]):
        return None
    update, model = min(found)
    origins = {rank: one for rank, one in _episodes(facts) if one.model == model and _covers(one, update)}
    if not origins:
        return _of_unknown_origin(facts, update, model)
    return _of_ranks(facts, origins, model, update)


def _of_ranks(facts: Facts, found: dict[int, NonFiniteGradients], model: int, update: int) -> Verdict:
    step = min(one.step for one in found.values())
    origins = {rank: one for rank, one in found.items() if one.step == step}
    seen = {rank for rank, one in _episodes(facts) if one.model == model and step in one.finite_steps}
    finite = sorted(seen - {*origins})
    first = next(iter(origins.values()))
    last_update = step if any(one.is_used for one in origins.values()) else update
    return Verdict(
        kind="not finite",
        **text.not_finite(origins, finite, unknown=sorted({*facts.world} - {*origins} - seen), last_update=last_update),
        blamed=tuple(origins) if finite else (),
        concerned=tuple(origins),
        step=step,
        last_step=last_update if last_update > step else None,
        bucket=first.bucket,
        parameters=first.parameters,
    )


def _covers(one: NonFiniteGradients, update: int) -> bool:
    """Return True if gradients were not finite in the step of an update, and weights were before."""
    return not one.weights_before and one.step <= update and (one.last_step is None or one.last_step >= update)


def note_non_finite_gradients(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return what another fault may have done to the weights."""
    if verdict.kind == "not finite" or not verdict.is_fault:
        return ()
    found = find_non_finite_weights(facts)
    return () if found is None else (found.sentence,)


def _episodes(facts: Facts) -> Iterator[tuple[int, NonFiniteGradients]]:
    for rank, evidence in sorted(facts.ranks.items()):
        for one in evidence.non_finite:
            yield rank, one


def _update_of(one: NonFiniteGradients) -> int:
    """Return the latest step whose update can have brought it into the weights; -1: they had it from the start."""
    return one.step - 1 if one.weights_before else one.step


def _was_wrong_before(facts: Facts, update: int) -> bool:
    """Return True if replicas had differed, or gradients had not been reduced, in an earlier step."""
    drifted = any(
        one.difference is not None and not one.difference.was_made_equal and one.difference.differs_step <= update
        for one in facts.evidence.replicas
    )
    return drifted or any(lost.step < update for one in facts.ranks.values() for lost in one.unreduced)


def _of_unknown_origin(facts: Facts, update: int, model: int) -> Verdict:
    seen = [one for _, one in _episodes(facts) if one.model == model and one.weights_before]
    weights = seen[0].weights_before
    first_update = min((one.earliest_step for one in seen if _update_of(one) == update), default=update)
    first_update = min(first_update, update)
    return Verdict(
        kind="not finite",
        **text.not_finite_from_unknown(first_update, update, weights),
        concerned=tuple(sorted(facts.ranks)),
        step=max(first_update, 0),
        last_step=update if update > first_update else None,
        parameters=weights,
    )
