"""Texts of remarks: what looks like an oversight in a training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlapscope.diagnosis.evidence import NonFiniteGradients
from overlapscope.diagnosis.loop_facts import RepeatedReductions
from overlapscope.diagnosis.replica_drift import StillParameters
from overlapscope.diagnosis.text import first_few, join_and, plural
from overlapscope.diagnosis.texts.finite import list_names, value_of
from overlapscope.text import capitalize, count_of, format_ranks, rank_list

_MOST_STEPS = 3


def not_used(rank: int, found: Sequence[NonFiniteGradients]) -> str:
    """Describe gradients that were not finite and did no harm."""
    first = found[0]
    steps = [one.step for one in found]
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {format_ranks(steps[:_MOST_STEPS])}"
    more = f" and {count_of(len(steps) - _MOST_STEPS, 'time')} more" if len(steps) > _MOST_STEPS else ""
    return (
        f"Gradients of rank {rank} were {value_of(first)} in {when}{more} "
        f"({list_names(first.parameters, first.tensors)}), and the weights have remained finite, as when a gradient "
        f"scaler leaves out {plural(steps, 'the update', 'the updates')}."
    )


def restored(rank: int, one: NonFiniteGradients) -> str:
    """Describe weights that were not finite for some steps."""
    unseen = one.step - one.earliest_step
    since = f"step {one.step}" + (f", or up to {count_of(unseen, 'step')} before," if unseen else "")
    return (
        f"On rank {rank} gradients and weights were not finite from {since} to step {one.last_step}, and then "
        "they were again, as after loading a checkpoint."
    )


def reduced_twice(ranks: Sequence[int], one: RepeatedReductions) -> str:
    """Describe gradients that were reduced although they were averages already."""
    times = f"{count_of(one.updates, 'update')} on {rank_list(ranks)}, first in step {one.step}"
    if one.by == "user":
        line = f" at {one.site}" if one.site else ""
        return (
            f"Gradients of model {one.model} that DDP averages were all-reduced by the script as well{line}, before "
            f"{times}: that changes nothing if the script divides by the number of ranks, and scales them if not."
        )
    return (
        f"Each of {one.backwards} backwards of model {one.model} reduced the same gradients, before {times}: only the "
        "last has to, and the others may run under no_sync()."
    )


def unequal_micro_batches(model: int, step: int, sides: Mapping[int, Sequence[int]]) -> str:
    """Describe ranks that ran unequal numbers of backwards before one update."""
    counts = join_and(
        [f"{count_of(count, 'backward')} on {rank_list(ranks)}" for count, ranks in sorted(sides.items())]
    )
    return (
        f"Before the update of step {step} model {model} had {counts}: all ranks count the same in the average, "
        "however many micro batches they have added up."
    )


def unheld(rank: int, names: Sequence[str]) -> str:
    """Describe parameters that no optimizer of a rank updates."""
    return (
        f"No optimizer of rank {rank} updates {count_of(len(names), 'parameter')} ({first_few(names)}) that "
        f"{plural(names, 'is', 'are')} updated on other ranks."
    )


def stand_still(one: StillParameters, *, is_since_start: bool) -> str:
    """Describe parameters of a rank that do not change."""
    since = "have not changed since training began" if is_since_start else f"have not changed since step {one.step}"
    since = since.replace("have", "has") if len(one.names) == 1 else since
    return (
        f"{capitalize(count_of(len(one.names), 'parameter'))} of rank {one.rank} ({first_few(one.names)}) {since}, "
        f"and on other ranks {plural(one.names, 'it changes', 'they change')}."
    )


def same_data(ranks: Sequence[int], batches: int) -> str:
    """Describe ranks that are given the same data."""
    return (
        f"{capitalize(rank_list(ranks))} were given the same data in all {batches} batches that were compared, so "
        "they add nothing to each other's gradients: use a DistributedSampler, or seeds that differ between ranks."
    )
