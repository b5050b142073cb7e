"""Rule for ranks that passed different settings to DDP, if that is why they launch different collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Entry, GroupOrder
from overlapscope.diagnosis.facts import Facts
from overlapscope.diagnosis.rules.order import find_divergence
from overlapscope.diagnosis.settings import HOOK, SettingDifference, find_setting_differences, find_setting_line
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import at_line, join_and, rank_list
from overlapscope.trace.signature import NO_BUCKET

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
_MOST_LINES: Final = 4


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
        f"{'; '.join(map(str, because))}{_lines(sites)}."
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


def _lines(sites: Mapping[int, CallSite]) -> str:
    """Format lines: `` at_line train.py:20 (main)``, or the line of each rank if there are several."""
    ranks_at: dict[CallSite, list[int]] = {}
    for rank, site in sites.items():
        ranks_at.setdefault(site, []).append(rank)
    if len(ranks_at) < 2:
        return "".join(at_line(site) for site in ranks_at)
    sentences = [f"{rank_list(ranks)}{at_line(site)}" for site, ranks in list(ranks_at.items())[:_MOST_LINES]]
    return f" ({', '.join(sentences)})"
