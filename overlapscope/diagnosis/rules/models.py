"""Rule for ranks that passed different models to DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Entry, GroupOrder, ModelParameters
from overlapscope.diagnosis.rank_settings import HOOK, SettingDifference, find_setting_differences, find_setting_line
from overlapscope.diagnosis.rules.order import find_divergence
from overlapscope.diagnosis.text import at_line, capitalize, join_and, plural, rank_list
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority
from overlapscope.trace.schema import NO_BUCKET

# Rule for ranks that passed different settings to DDP, if that is why they launch different collectives.

_OTHER_PLAN: Final = "the bucket plan"
_OTHER_BUCKET: Final = "which bucket"
_OTHER_CONTENT: Final = "what is reduced of a bucket"
_CHANGES: Final[dict[str, tuple[str, ...]]] = {
    "wrapper": ("construction", "plan"),
    "init_sync": ("construction", "plan"),
    "broadcast_buffers": ("construction", "buffers"),
    "forward_sync_buffers": ("buffers",),
    "find_unused_parameters": ("bitmap", "plan", _OTHER_PLAN),
    "static_graph": ("bitmap", "plan", _OTHER_PLAN),
    "bucket_cap_mb": (_OTHER_PLAN,),
    "bucket_cap_mb_list": (_OTHER_PLAN,),
    "skip_all_reduce_unused_params": ("bitmap", _OTHER_BUCKET),
    "mixed_precision": (_OTHER_CONTENT,),
    "strategy": (_OTHER_CONTENT, _OTHER_PLAN, "hook"),
    HOOK: ("hook", _OTHER_CONTENT),
}
"""What each setting changes about the launches of a rank: collectives of these roles, or a property of buckets.

All other settings are harmless.
"""

_STALL_KINDS: Final = ("slow", "stuck", "waits for data", "holds the GIL", "cannot tell")
_MAX_NOTES: Final = 6
_MAX_SETTING_LINES: Final = 4


def find_settings_fault(facts: Facts) -> Verdict | None:
    """Find settings that affect the first collectives that differ, and split the ranks in the same way."""
    found = find_divergence(facts)
    if found is None:
        return None
    group = next(one for one in facts.evidence.groups if one.name == found.group)
    because = _explaining_settings(facts, group)
    if not because:
        return None
    model, is_hook = because[0].model or 0, because[0].name == HOOK
    sites = {
        rank: site
        for rank in sorted(facts.ranks)
        if rank in group.ranks and (site := find_setting_line(facts.ranks[rank], model, is_hook=is_hook)) is not None
    }
    is_harmless = is_hook and _looks_the_same(group)
    return replace(
        found,
        kind="settings differ",
        sentence=f"The ranks gave different settings to DistributedDataParallel (model {model}): "
        f"{'; '.join(map(str, because))}{_setting_lines(sites)}."
        + ("" if is_harmless else f" So they launched different collectives in step {found.step or 0}."),
        alternative="the hooks may compute the same" if is_harmless else "",
        parameters=(),
        call_sites={rank: site for rank, site in sites.items() if rank in (found.windows or ())} or None,
        evidence=(found.sentence, *found.evidence),
        advice=(f"Give {join_and([one.name for one in because])} the same value on all ranks.",),
    )


def note_setting_differences(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return the settings that differ but are not known to be related to the fault, one sentence each."""
    if verdict.kind == "healthy":
        return ()
    sentences = [
        f"Not known to be the cause: {one}" + (f" (DDP instance {one.model})." if one.model is not None else ".")
        for one in find_setting_differences(facts.ranks)
        if not (verdict.kind == "settings differ" and str(one) in verdict.sentence)
        and not (one.is_variable and verdict.kind not in _STALL_KINDS)
    ]
    return tuple(sentences[:_MAX_NOTES])


def _explaining_settings(facts: Facts, group: GroupOrder) -> list[SettingDifference]:
    """Return the settings that change exactly what differs, and have one value on each side."""
    if group.divergence != "signature":
        return []
    number = group.first_divergence
    at_number = {rank: entry for rank, window in group.windows.items() for entry in window if entry.number == number}
    sides: dict[int, list[int]] = {}
    for rank, entry in at_number.items():
        sides.setdefault(entry.signature.hash, []).append(rank)
    changed, models = _what_changes(at_number.values()), _models_of(facts, at_number)
    return [
        one
        for one in find_setting_differences(facts.ranks)
        if models == {one.model}
        and not changed.isdisjoint(_CHANGES.get(one.name, ()))
        and _is_split_like(one, sides.values())
        and (not one.name.startswith("bucket_cap_mb") or all(_keeps_first_plan(facts, rank) for rank in at_number))
    ]


def _what_changes(entries: Iterable[Entry]) -> set[str]:
    """Return what differs between the collectives of ranks at one number, in the terms of ``_CHANGES``."""
    signatures = [entry.signature for entry in entries]
    roles = {signature.role for signature in signatures}
    if all(signature.bucket != NO_BUCKET for signature in signatures):
        if len({signature.plan_hash for signature in signatures}) > 1:
            return {_OTHER_PLAN}
        return {_OTHER_BUCKET if len({signature.bucket for signature in signatures}) > 1 else _OTHER_CONTENT}
    return roles - {"user", "bucket"}


def _models_of(facts: Facts, at_number: Mapping[int, Entry]) -> set[int]:
    """Return the DDP instances of these collectives; during a construction, it is the latest of the rank."""
    return {
        max((one.model or 0 for one in facts.ranks[rank].settings), default=0)
        if entry.signature.role == "construction"
        else entry.signature.model
        for rank, entry in at_number.items()
        if entry.signature.role != "user" and rank in facts.ranks
    }


def _is_split_like(one: SettingDifference, sides: Iterable[Sequence[int]]) -> bool:
    """Return True if a setting has one value on each side, and not the same on all."""
    values = [{one.value_of(rank) for rank in ranks} for ranks in sides]
    return all(len(value) == 1 and None not in value for value in values) and len(set().union(*values)) > 1


def _keeps_first_plan(facts: Facts, rank: int) -> bool:
    """Return True if a rank's buckets are never rebuilt to rank 0's plan, so that its own cap counts."""
    return any(
        settings.values.get("wrapper") == "torch"
        and settings.values.get("find_unused_parameters") == "True"
        and settings.values.get("static_graph") != "True"
        for settings in facts.ranks[rank].settings
    )


def _looks_the_same(group: GroupOrder) -> bool:
    """Return True if the first collectives that differ match anyway: hooks state their reduction, DDP does not."""
    there = [e.signature for window in group.windows.values() for e in window if e.number == group.first_divergence]
    is_sum = all(signature.reduce_op in ("", "sum") for signature in there)
    return is_sum and len({(each.op, each.dtype, each.elements, each.bucket) for each in there}) == 1


def _setting_lines(sites: Mapping[int, CallSite]) -> str:
    """Format lines: `` at_line train.py:20 (main)``, or the line of each rank if there are several."""
    ranks_at: dict[CallSite, list[int]] = {}
    for rank, site in sites.items():
        ranks_at.setdefault(site, []).append(rank)
    if len(ranks_at) < 2:
        return "".join(at_line(site) for site in ranks_at)
    sentences = [f"{rank_list(ranks)}{at_line(site)}" for site, ranks in list(ranks_at.items())[:_MAX_SETTING_LINES]]
    return f" ({', '.join(sentences)})"


_NOTHING: Final = "no parameter"
_MAX_MODEL_LINES: Final = 16


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
        call_sites=_model_lines(facts, (*ranks, *others)) or None,
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


def _model_lines(facts: Facts, ranks: tuple[int, ...]) -> dict[int, CallSite]:
    """Return where each rank created the model: from DDP's first collectives, or the exception that followed."""
    sites = {}
    for rank in ranks[:_MAX_MODEL_LINES]:
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
