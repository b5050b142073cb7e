"""Rules for replicas that drift apart: nothing fails, but the ranks no longer train one model."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Final

from overlapscope.diagnosis.evidence import UnreducedCause, UnreducedStep
from overlapscope.diagnosis.loop_facts import is_usually_reduced
from overlapscope.diagnosis.replica_drift import (
    ComparedReplicas,
    HyperparameterDifference,
    ReplicaDifference,
    compare_hyperparameters,
)
from overlapscope.diagnosis.texts import replicas as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, find_minority
from overlapscope.trace.schema import NO_BUCKET

_AVERAGED_ON_PURPOSE = "post_localSGD"
"""Part of the name of torch's hook that reduces within groups of ranks, and averages replicas now and then."""
_OUTSIDE_DDP: Final[tuple[UnreducedCause, ...]] = ("outside", "in part", "left out")
"""Causes with parameters in no DDP instance."""


def find_unreduced_gradients(facts: Facts) -> Verdict | None:
    """Find an optimizer step with gradients that were never averaged with those of the other ranks."""
    found = _find_harmful_updates(facts)
    if not found:
        return None
    first = min((one for one, _ in found), key=lambda one: (one.cause in _OUTSIDE_DDP, one.step))
    steps = {rank: one for one, rank in found if (one.model, one.cause) == (first.model, first.cause)}
    ranks = tuple(steps)
    others = sorted({*facts.world} - {rank for _, rank in found})
    reduced = [rank for rank in others if _is_known_to_reduce(facts, rank, ranks, first.step)]
    is_proven = _differ_since(facts, first)
    is_final = is_proven and not facts.evidence.is_live
    return Verdict(
        kind="not reduced",
        **text.unreduced(
            ranks,
            replace(first, updates=max(one.updates for one in steps.values())),
            is_proven=is_proven,
            first_compared=_find_late_comparison(facts, first),
            may_be_averaged=first.cause == "no_sync" and not first.reduced_backwards and not is_final,
            unknown=sorted({*others} - {*reduced}),
        ),
        blamed=ranks if 2 * len(reduced) > len(facts.world) > 2 else (),
        concerned=ranks,
        step=first.step,
        parameters=first.parameters,
        call_sites=known_sites({rank: steps[rank].call_site for rank in ranks[:8]}),
    )


def _is_known_to_reduce(facts: Facts, rank: int, unreduced: tuple[int, ...], step: int) -> bool:
    """Return True if a rank is past its update of a step, or in an all-reduce of it that other ranks have left out.

    Of a rank that has not come that far it is unknown what its update will use.
    """
    one = facts.ranks.get(rank)
    if one is None or rank in facts.unrecorded or one.liveness == "silent":  # its updates may be unknown
        return False
    if one.steps_done > step:
        return True
    group, entry = facts.blocked.get(rank, (None, None))
    if group is None or entry is None or entry.signature.bucket == NO_BUCKET or entry.step < step:
        return False
    differs = group.first_divergence is not None and group.first_divergence <= entry.number
    return differs or all(group.latest.get(other, 0) < entry.number for other in unreduced)


def _find_harmful_updates(facts: Facts) -> list[tuple[UnreducedStep, int]]:
    """Return updates that made replicas differ, or may have, each with its rank."""
    return [
        (one, rank)
        for rank, evidence in sorted(facts.ranks.items())
        for one in evidence.unreduced
        if not one.is_averaged_by_user and _is_harmful(facts, one)
    ]


def note_harmless_updates(facts: Facts) -> list[str]:
    """Return what is known of updates with gradients of one rank alone that did no harm, for a healthy job."""
    found: dict[tuple[int, str], dict[int, UnreducedStep]] = {}
    for rank, evidence in sorted(facts.ranks.items()):
        for one in evidence.unreduced:
            if one.cause not in _OUTSIDE_DDP:
                found.setdefault((one.model, one.cause), {})[rank] = one
    return [text.harmless_unreduced(tuple(steps), next(iter(steps.values()))) for steps in found.values()]


def _is_harmful(facts: Facts, one: UnreducedStep) -> bool:
    """Return True unless replicas refute it.

    Parameters in no DDP instance may be each rank's own: only if they were the same are they known to be replicas, or
    if nearly all updates use averages, and they were first compared after one that does not.
    """
    if one.cause not in _OUTSIDE_DDP:
        return not (_are_equal_since(facts, one) or _differed_before(facts, one))
    compared = _replicas_of(facts, one)
    has_parted = compared is not None and _have_parted(compared)
    return has_parted or _find_late_comparison(facts, one) is not None


def _find_late_comparison(facts: Facts, one: UnreducedStep) -> int | None:
    """Return the step of the first comparison, if it comes after an update without the usual reduction, and differs."""
    compared = _replicas_of(facts, one)
    difference = None if compared is None else compared.difference
    if one.cause != "left out" or difference is None or difference.equal_at is not None:
        return None
    return difference.differs_step if one.step < difference.differs_step else None


def _have_parted(one: ComparedReplicas) -> bool:
    """Return True if parameters were the same on all ranks and are not any more."""
    if one.difference is not None:
        return one.difference.equal_at is not None and not one.difference.was_made_equal
    was_equal = one.was_different is None and one.latest_step is not None
    return was_equal and one.at_end is not None and bool(one.at_end.differing)


def _replicas_of(facts: Facts, one: UnreducedStep) -> ComparedReplicas | None:
    return next((compared for compared in facts.evidence.replicas if compared.model == one.model), None)


def _differ_since(facts: Facts, one: UnreducedStep) -> bool:
    """Return True if the model is known to differ between ranks since an update, or at the end."""
    compared = _replicas_of(facts, one)
    if compared is None:
        return False
    is_at_end = compared.at_end is not None and bool(compared.at_end.differing)
    return is_at_end or (compared.difference is not None and compared.difference.differs_step > one.step)


def _differed_before(facts: Facts, one: UnreducedStep) -> bool:
    """Return True if the model differed between ranks already when the step of an update began."""
    compared = _replicas_of(facts, one)
    return (
        compared is not None
        and compared.difference is not None
        and not compared.difference.was_made_equal
        and compared.difference.differs_step <= one.step
    )


def _are_equal_since(facts: Facts, one: UnreducedStep) -> bool:
    """Return True if the model is known to have been the same on all ranks after an update, and ever since.

    Then the ranks had the same gradients, or they were reduced in a way that is not known.
    """
    compared = _replicas_of(facts, one)
    if compared is None or compared.difference is not None or compared.was_different is not None:
        return False
    if compared.at_end is not None:
        return not compared.at_end.differing
    return compared.latest_step is not None and compared.latest_step > one.step


def find_replica_drift(facts: Facts) -> Verdict | None:
    """Find the first model whose parameters differ between ranks, unless they are made equal now and then."""
    found = [one for one in _comparisons(facts) if _has_drifted(facts, one)]
    if not found:
        return None
    compared = min(found, key=lambda one: one.difference.differs_step)  # type: ignore[union-attr]
    difference = compared.difference
    assert difference is not None
    has_settings, others = compare_hyperparameters(
        {rank: facts.ranks[rank].hyperparameters for rank in compared.ranks if rank in facts.ranks}
    )
    setting = next((one for one in others if _explains(one, difference)), None)
    earliest, latest = difference.equal_step, difference.differs_step - 1
    if setting is not None and setting.is_since_then and earliest is not None:
        earliest = latest = setting.step
    return Verdict(
        kind="replicas differ",
        **text.differ(
            compared,
            difference,
            _model_text(facts, compared),
            (earliest, latest),
            setting,
            are_settings_equal=has_settings and not others,
            has_settings=has_settings,
            has_uneven_inputs=facts.has_uneven_inputs,
        ),
        blamed=find_minority(difference.sides, len(compared.ranks)),
        concerned=tuple(sorted(chain.from_iterable(difference.sides))),
        step=earliest,
        last_step=None if earliest == latest or earliest is None else latest,
        parameters=difference.names,
        bucket=_bucket(compared, difference),
    )


def find_replica_drift_at_end(facts: Facts) -> Verdict | None:
    """Find the first model whose parameters were equal in all comparisons, but differ when recordings end."""
    return next((_differ_at_end(facts, one) for one in _comparisons(facts) if _has_drifted_at_end(one)), None)


def note_replica_comparison(facts: Facts) -> list[str]:
    """Return the results of the comparison for a healthy job."""
    known = [one for one in facts.evidence.replicas if _are_replicas(facts, one)]
    return [note for one in known for note in text.comparison_notes(one, _model_text(facts, one))]


def _comparisons(facts: Facts) -> list[ComparedReplicas]:
    """Return the comparisons of what is trained as one model, and not averaged by the user now and then."""
    return [one for one in facts.evidence.replicas if _are_replicas(facts, one) and not _is_averaged(facts, one)]


def _is_averaged(facts: Facts, one: ComparedReplicas) -> bool:
    """Return True if the user's collectives have averaged a model after updates without a reduction."""
    steps = chain.from_iterable(evidence.unreduced for evidence in facts.ranks.values())
    return any(step.model == one.model and step.is_averaged_by_user for step in steps)


def _has_drifted_at_end(one: ComparedReplicas) -> bool:
    """Return True if parameters differ only at the end, but not all: loading a checkpoint would change all of them."""
    is_complete = one.at_end is None or not one.at_end.differing or one.at_end.is_all_trained
    return (
        not is_complete
        and not one.is_outside
        and one.difference is None
        and one.was_different is None
        and one.comm_hook is None
    )


def _differ_at_end(facts: Facts, one: ComparedReplicas) -> Verdict:
    at_end = one.at_end
    assert at_end is not None
    last_step = max((facts.ranks[rank].steps_done for rank in one.ranks if rank in facts.ranks), default=0) - 1
    return Verdict(
        kind="replicas differ",
        **text.differ_at_end(one, at_end.differing, at_end.sides, _model_text(facts, one), at_end.equal_step),
        blamed=find_minority(at_end.sides, len(one.ranks)),
        concerned=one.ranks,
        step=at_end.equal_step,
        last_step=None if at_end.equal_step is None or last_step <= at_end.equal_step else last_step,
        parameters=at_end.differing,
    )


def _are_replicas(facts: Facts, one: ComparedReplicas) -> bool:
    """Return True if parameters are known to be trained as one model: without DDP each rank may train its own."""
    has_wrappers = any(evidence.models for evidence in facts.ranks.values())
    loops = {rank: evidence.loop for rank, evidence in facts.ranks.items()}
    return not one.is_outside or has_wrappers or is_usually_reduced(loops, one.model)


def _has_drifted(facts: Facts, one: ComparedReplicas) -> bool:
    may_be_join = facts.has_uneven_inputs and not one.is_outside  # what makes them equal, at its end
    if one.difference is None or (one.difference.was_made_equal and not may_be_join):
        return False
    if one.is_outside and one.difference.equal_at is None:  # perhaps never meant to be the same
        return False
    return _AVERAGED_ON_PURPOSE not in (one.comm_hook or "")


def _explains(setting: HyperparameterDifference, difference: ReplicaDifference) -> bool:
    """Return True if a hyperparameter splits the ranks in the same way, and did so when replicas began to differ."""
    is_same = {ranks for _, ranks in setting.values} == {tuple(sorted(side)) for side in difference.sides}
    is_before = setting.step < difference.differs_step
    is_first = difference.equal_step is None or not setting.is_since_then or setting.step >= difference.equal_step
    return is_same and is_before and is_first and difference.differs_at > 0


def _bucket(compared: ComparedReplicas, difference: ReplicaDifference) -> int | None:
    """Return the bucket of the parameters, if it is the same for all."""
    buckets = {compared.buckets.get(name) for name in difference.names}
    return buckets.pop() if len(buckets) == 1 else None


def _model_text(facts: Facts, compared: ComparedReplicas) -> str:
    return text.model_text(compared, sum(not one.is_outside for one in facts.evidence.replicas))
