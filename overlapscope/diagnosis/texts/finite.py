"""Texts on gradients that were not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlapscope.diagnosis.evidence import NonFiniteGradients
from overlapscope.diagnosis.text import join_and
from overlapscope.diagnosis.verdict import VerdictText
from overlapscope.text import rank_list

_MOST_NAMES = 3
_LOOK = "Of each gradient a few elements are looked at, and others the next time; short steps are not all looked at."


def not_finite(
    origins: Mapping[int, NonFiniteGradients], finite: Sequence[int], *, unknown: Sequence[int], last_update: int
) -> VerdictText:
    """Describe gradients that were not finite before the reduction, and got into the weights.

    Args:
        origins: what was found, by rank.
        finite: ranks whose gradients were seen to be finite in that step.
        unknown: ranks of which nothing is known of that step.
        last_update: latest step whose update can be the first that has used them.
    """
    first = next(iter(origins.values()))
    is_everywhere = not finite and not unknown
    updates, when = f"the update of step {first.step}", "that step"
    if last_update > first.step:
        updates, when = f"an update of steps {first.step} to {last_update}", f"step {first.step}"
    where = "all ranks" if is_everywhere else rank_list(origins)
    evidence = [f"These gradients were {value_of(first)} before they were averaged, from bucket {first.bucket} on."]
    if finite:
        evidence.append(f"On {rank_list(finite)} gradients were finite in that step, where they were looked at.")
    if unknown:
        evidence.append(f"Whether those of {rank_list(unknown)} were finite in that step is not known.")
    if bad := [rank for rank, one in origins.items() if one.is_batch_finite is False]:
        evidence.append(f"What the model was given on {rank_list(bad)} in that step was not finite either.")
    elif good := [rank for rank, one in origins.items() if one.is_batch_finite]:
        evidence.append(f"What the model was given on {rank_list(good)} in that step was finite.")
    evidence.append(_LOOK)
    return {
        "sentence": f"The weights have not been finite since {updates}: the gradients of "
        f"{list_names(first.parameters, first.tensors)} on {where} were {value_of(first)} in {when}, before they were "
        "averaged.",
        "evidence": tuple(evidence),
        "advice": (_advice(is_batch_bad=bool(bad), is_everywhere=is_everywhere),),
    }


def _advice(*, is_batch_bad: bool, is_everywhere: bool) -> str:
    if is_batch_bad:
        return "Find out which sample of that batch is not finite; check data when it is loaded."
    if is_everywhere:
        return (
            "As all ranks are alike, look at what they have in common: the learning rate, the loss, the precision. "
            "torch.autograd.detect_anomaly() names the operation."
        )
    return (
        "Look at what the loss of that rank was made of: a logarithm or a division by zero, an empty batch or mask. "
        "torch.autograd.detect_anomaly() names the operation."
    )


def not_finite_from_unknown(first_update: int, update: int, weights: Sequence[str]) -> VerdictText:
    """Describe weights that are not finite, where no gradient was seen that explains it.

    Args:
        first_update: first step after the latest look at finite gradients.
        update: latest step whose update can be the cause; -1 if there was none.
        weights: the parameters.
    """
    names = list_names(weights, len(weights))
    if update < 0:
        return {
            "sentence": f"The weights were not finite before the first step: {names}.",
            "evidence": (),
            "advice": ("Look at how they are initialized, or at the checkpoint that they were loaded from.",),
        }
    updates = f"the update of step {update}"
    if first_update < update:
        updates = f"an update of steps {first_update} to {update},"
    return {
        "sentence": f"The weights ({names}) have not been finite since {updates} or one shortly before.",
        "evidence": (f"No gradient was seen to be the cause, so no rank is known to be. {_LOOK}",),
        "advice": (
            "Look at what the gradients of these parameters are computed from; torch.autograd.detect_anomaly() names "
            "the operation.",
        ),
    }


def value_of(one: NonFiniteGradients) -> str:
    """Return what gradients were."""
    return "NaN" if one.has_nan else "infinite"


def list_names(names: Sequence[str], count: int) -> str:
    """Format the names of parameters, of which only the first are known."""
    shown = list(names[:_MOST_NAMES])
    more = max(count, len(names)) - len(shown)
    return join_and([*shown, f"{more} more"]) if more > 0 else join_and(shown) or "some parameters"
