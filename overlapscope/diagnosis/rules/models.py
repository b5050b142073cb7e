"""Rules for ranks that gave different models or settings to DistributedDataParallel.

Settings count only if they are why ranks launch different collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Entry, GroupOrder, ModelParameters
from overlapscope.diagnosis.rank_settings import HOOK, SettingDifference, find_setting_differences, find_setting_line
from overlapscope.diagnosis.rules.order import find_divergence
from overlapscope.diagnosis.text import join_and
from overlapscope.diagnosis.texts import collectives as text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority
from overlapscope.trace.schema import NO_BUCKET

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
    sites = _setting_sites(facts, group, model, is_hook=is_hook)
    is_harmless = is_hook and _looks_the_same(group)
    return replace(
        found,
        kind="settings differ",
        **text.settings_differ(model, because, sites, found, is_harmless=is_harmless),
        blamed=find_minority(because[0].ranks_with.values(), len(group.ranks)),
        parameters=(),
        call_sites={rank: site for rank, site in sites.items() if rank in found.windows},
    )


def _setting_sites(facts: Facts, group: GroupOrder, model: int, *, is_hook: bool) -> dict[int, CallSite]:
    members = [one for rank, one in sorted(facts.ranks.items()) if rank in group.ranks]
    sites = {one.rank: find_setting_line(one, model, is_hook=is_hook) for one in members}
    return {rank: site for rank, site in sites.items() if site is not None}


def note_setting_differences(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return the settings that differ but are not known to be related to the fault, one sentence each."""
    if verdict.kind == "healthy":
        return ()
    notes = [
        text.unrelated_setting(one)
        for one in find_setting_differences(facts.ranks)
        if not (verdict.kind == "settings differ" and str(one) in verdict.sentence)
        and not (one.is_variable and verdict.kind not in _STALL_KINDS)
    ]
    return tuple(notes[:_MAX_NOTES])


def _explaining_settings(facts: Facts, group: GroupOrder) -> list[SettingDifference]:
    """Return the settings that change exactly what differs, and have one value on each side."""
    if group.divergence != "signature":
        return []
    at_number = group.entries_at(group.first_divergence)
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
    there = [entry.signature for entry in group.entries_at(group.first_divergence).values()]
    is_sum = all(signature.reduce_op in ("", "sum") for signature in there)
    return is_sum and len({(each.op, each.dtype, each.elements, each.bucket) for each in there}) == 1


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
    difference, name = _first_difference(reference, ranks, other, others)
    contents = [
        (side_ranks, side.class_name, len(side.parameters), len(side.frozen)) for side, side_ranks in sides.items()
    ]
    is_order = reference.parameters != other.parameters and sorted(reference.parameters) == sorted(other.parameters)
    return Verdict(
        kind="models differ",
        **text.models_differ(number, difference, contents, is_order=is_order),
        blamed=blamed,
        concerned=tuple(sorted({*ranks, *others})),
        parameters=(name,) if name else (),
        call_sites=_model_lines(facts, (*ranks, *others)),
    )


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


def _first_difference(
    a: ModelParameters, ranks: Sequence[int], b: ModelParameters, others: Sequence[int]
) -> tuple[str, str]:
    """Return the first difference between the models of two sides as text, and the name of the parameter."""
    if frozen := _frozen_on_one_side(a, b):
        states = ("frozen", "trained") if frozen in a.frozen else ("trained", "frozen")
        return text.frozen_differ(f"'{frozen}' is {states[0]}", ranks, states[1], others), frozen
    for index, (one, other) in enumerate(zip_longest(a.parameters, b.parameters)):
        if one == other:
            continue
        if one is None:
            return text.extra_parameter(index, text.parameter_text(*other), others, ranks), other[0]
        if other is None:
            return text.extra_parameter(index, text.parameter_text(*one), ranks, others), one[0]
        difference = text.parameters_differ(
            index, text.parameter_text(*one), ranks, text.parameter_text(*other), others
        )
        return difference, one[0]
    return text.frozen_differ(_frozen_text(a), ranks, _frozen_text(b), others), ""


def _frozen_text(model: ModelParameters) -> str:
    return f"{join_and(model.frozen) if model.frozen else 'nothing'} is frozen"


def _frozen_on_one_side(a: ModelParameters, b: ModelParameters) -> str | None:
    """Return the first parameter that only one side has frozen, if both have the same parameters."""
    differing = {*a.frozen} ^ {*b.frozen}
    if not differing or sorted([*_trained(a), *a.frozen]) != sorted([*_trained(b), *b.frozen]):
        return None
    order = [name for name in (*_trained(a), *_trained(b)) if name in differing]
    return (order or sorted(differing))[0]


def _trained(model: ModelParameters) -> list[str]:
    return [name for name, _, _ in model.parameters if name not in model.frozen]
