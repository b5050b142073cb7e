"""Rule for ranks that passed different models to DistributedDataParallel."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import CallSite, ModelParameters
from overlapscope.diagnosis.facts import Facts, find_minority
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import capitalize, join_and, plural, rank_list

_NOTHING: Final = "no parameter"
_MOST_LINES: Final = 16


def find_model_difference(facts: Facts) -> Verdict | None:
    """Find a model whose parameters differ between ranks, or are in a different order."""
    numbers = sorted({model.model for one in facts.ranks.values() for model in one.models})
    for number in numbers:
        sides: dict[ModelParameters, list[int]] = {}
        for rank, one in sorted(facts.ranks.items()):
            for model in one.models:
                if model.model == number:
                    sides.setdefault(model, []).append(rank)
        if len({(side.parameters, side.frozen) for side in sides}) > 1:
            return _verdict(facts, number, sides)
    return None


def _verdict(facts: Facts, number: int, sides: dict[ModelParameters, list[int]]) -> Verdict:
    by_parameters: dict[tuple[object, ...], list[int]] = {}
    for side, ranks in sides.items():
        by_parameters.setdefault((side.parameters, side.frozen), []).extend(ranks)
    blamed = find_minority(by_parameters.values(), len(facts.world))
    reference, other = _two_model_sides(sides, blamed)
    ranks, others = sides[reference], sides[other]
    index, (what, what_of_other), name = _first_difference(reference, other)
    sentence = (
        f"The ranks gave different models to DistributedDataParallel (model {number}): "
        f"{_difference_text(index, (what, ranks), (what_of_other, others))}."
    )
    same_shapes = index is not None and sorted(reference.parameters) == sorted(other.parameters)
    evidence = [
        f"{capitalize(rank_list(side_ranks))}: {side.class_name}, {len(side.parameters)} parameters"
        + (f", {len(side.frozen)} frozen" if side.frozen else "")
        for side, side_ranks in sides.items()
    ]
    if same_shapes:
        evidence.append("They hold the same parameters in a different order.")
    advice = ["Register parameters and modules in an order that does not depend on the process: no set(), no hash()."]
    if not same_shapes:
        advice = ["Build the model from the same configuration on all ranks, and freeze the same parameters on all."]
    return Verdict(
        kind="models differ",
        sentence=sentence,
        blamed=blamed,
        concerned=tuple(sorted({*ranks, *others})),
        parameters=(name,) if name else (),
        call_sites=_lines(facts, (*ranks, *others)) or None,
        evidence=tuple(evidence),
        advice=tuple(advice),
    )


def _difference_text(index: int | None, *sides: tuple[str, list[int]]) -> str:
    """Format what each of two sides has.

    Args:
        place: index of the parameter; None if the difference is not at one index.
    """
    (what, ranks), (other, others) = sides
    for lacking, having in ((sides[0], sides[1]), (sides[1], sides[0])):
        if lacking[0] == _NOTHING:
            has, lacks = plural(having[1], "has", "have"), plural(lacking[1], "has", "have")
            return (
                f"{rank_list(having[1])} {has} a parameter {index}, {having[0]}, and {rank_list(lacking[1])} {lacks} "
                f"only {index}"
            )
    where = f"parameter {index} is " if index is not None else ""
    return f"{where}{what} on {rank_list(ranks)} and {other} on {rank_list(others)}"


def _lines(facts: Facts, ranks: tuple[int, ...]) -> dict[int, CallSite]:
    """Return where each rank created the model: from DDP's first collectives, or the exception that followed."""
    sites = {}
    for rank in ranks[:_MOST_LINES]:
        windows = [group.windows.get(rank, ()) for group in facts.evidence.groups]
        found = [
            e.call_site for window in windows for e in window if e.signature.role == "construction" and e.call_site
        ]
        failure = facts.ranks[rank].failure
        if site := found[-1] if found else failure.call_site if failure else None:
            sites[rank] = site
    return sites


def _two_model_sides(
    sides: dict[ModelParameters, list[int]], blamed: tuple[int, ...]
) -> tuple[ModelParameters, ModelParameters]:
    """Return a side without blamed ranks, and the first that differs from it."""
    ordered = sorted(sides, key=lambda side: (bool(set(sides[side]) & set(blamed)), min(sides[side])))
    reference = ordered[0]
    other = next(s for s in ordered if (s.parameters, s.frozen) != (reference.parameters, reference.frozen))
    return reference, other


def _first_difference(a: ModelParameters, b: ModelParameters) -> tuple[int | None, tuple[str, str], str]:
    """Return the index of the first difference, what each side has there, and the name of the parameter."""
    if (frozen := sorted({*a.frozen} ^ {*b.frozen})) and sorted([*_trained(a), *a.frozen]) == sorted(
        [*_trained(b), *b.frozen]
    ):
        order = [name for name in (*_trained(a), *_trained(b)) if name in frozen]
        name = (order or frozen)[0]
        state = ("frozen", "trained") if name in a.frozen else ("trained", "frozen")
        return None, (f"'{name}' is {state[0]}", state[1]), name
    for index in range(max(len(a.parameters), len(b.parameters))):
        one, other = (side.parameters[index] if index < len(side.parameters) else None for side in (a, b))
        if one != other:
            return index, (_parameter_text(one), _parameter_text(other)), (one or other or ("",))[0]
    texts = [f"{join_and(side.frozen) if side.frozen else 'nothing'} is frozen" for side in (a, b)]
    return None, (texts[0], texts[1]), ""


def _trained(model: ModelParameters) -> list[str]:
    return [name for name, _, _ in model.parameters if name not in model.frozen]


def _parameter_text(parameter: tuple[str, tuple[int, ...], str] | None) -> str:
    if parameter is None:
        return _NOTHING
    name, shape, dtype = parameter
    return f"'{name}' ({'×'.join(map(str, shape)) or 'scalar'} {dtype})"
