"""Ranks that the others wait for: out of data, without gradients, in the data loader, or elsewhere.

As long as a job runs, a standstill is a suspicion: what takes long once looks the same until it is over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from overlapscope.diagnosis.evidence import RankEvidence, UnreadyParameter
from overlapscope.diagnosis.facts import Facts, Wait, is_busy, is_timeout
from overlapscope.diagnosis.stacks import Waiting, waits_for
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wording import (
    at,
    capitalised,
    collective_text,
    group_text,
    in_step,
    loop_step,
    ranks_text,
    seconds_text,
    some,
    standing_text,
    verb,
)
from overlapscope.trace.signature import NO_BUCKET

_MAY_GO_ON: Final = "something that takes this long once looks the same from here"
_MIGHT_HAVE_GONE_ON: Final = "something that takes this long once looks the same: the job may have been ended too early"
_WAITING: Final[dict[Waiting, str]] = {
    "data loader": "waiting for data",
    "thread": "waiting for a lock or another thread",
    "process": "waiting for another process",
    "socket": "waiting for a socket",
    "file": "reading or writing a file",
    "torch.distributed": "in a call of torch.distributed",
}
_UNFINISHED_REDUCTION: Final = "Expected to have finished reduction"
_END_OF_SCRIPT: Final = re.compile(r"in (destroy_process_group|_shutdown|barrier|_exit_function|_python_exit)\b")


def never_ready(facts: Facts) -> Verdict | None:
    """Some gradients of a rank's newest backward are missing, so their bucket was never launched."""
    found = {rank: left for rank in sorted(facts.ranks) if (left := _left_by(facts, rank)) is not None}
    if not found:
        return None
    first, is_over = next(((rank, is_over) for rank, (_, is_over) in found.items() if is_over), (min(found), False))
    unready, _ = found[first]
    alike = tuple(rank for rank, left in found.items() if left == (unready, is_over))
    return _never_ready(facts, alike, unready, facts.wait_for(alike), is_over=is_over)


def _left_by(facts: Facts, rank: int) -> tuple[tuple[UnreadyParameter, ...], bool] | None:
    """The parameters that a rank's newest backward has left without a gradient, and whether it is certainly over."""
    one = facts.ranks[rank]
    unready = _unready(one)
    if not unready or rank in facts.unrecorded:
        return None
    has_said_so = _has_complained(one)
    is_awaited = facts.wait_for((rank,)) is not None or _others_have_the_bucket(facts, rank, unready[0])
    is_over = one.standing is not None and one.standing.phase not in ("backward", "finalise", "forward")
    is_there = (
        one.liveness not in ("gone", "stopped", "failed") and facts.is_stuck(rank) and not facts.is_only_slow(rank)
    )
    if has_said_so or (is_awaited and (is_over or is_there)):
        return unready, has_said_so or is_over
    return None


def _has_complained(one: RankEvidence) -> bool:
    """Whether DDP has said so itself, in the forward of the step after."""
    return one.failure is not None and _UNFINISHED_REDUCTION in one.failure.message


def in_no_sync(facts: Facts) -> Verdict | None:
    """A rank has gone through the step in which others wait for its bucket, without reducing anything."""
    ranks = tuple(rank for rank in facts.awaited if (one := facts.ranks.get(rank)) and one.no_sync_since is not None)
    wait = facts.wait_for(ranks)
    if wait is None:
        return None
    missed = wait.missed_by(ranks)
    passed = tuple(
        rank for rank in ranks if (facts.ranks[rank].no_sync_since or 0) <= missed.step < facts.ranks[rank].steps_done
    )
    if not passed or missed.signature.bucket == NO_BUCKET:
        return None
    since = min(facts.ranks[rank].no_sync_since or 0 for rank in passed)
    return Verdict(
        kind="not reduced",
        sentence=f"{capitalised(ranks_text(passed))} {verb(passed, 'has', 'have')} run every backward from step "
        f"{since} on under no_sync(), and {ranks_text(facts.waiting)} {verb(facts.waiting, 'waits', 'wait')} for "
        f"{verb(passed, 'it', 'them')}{in_step(missed)}: {collective_text(missed)}{at(missed.call_site)}.",
        blamed=passed if 2 * len(passed) < len(facts.world) else (),
        concerned=tuple(sorted({*passed, *facts.waiting})),
        evidence=tuple(f"Rank {rank} has done {facts.ranks[rank].steps_done} steps." for rank in passed[:4]),
        advice=("Enter no_sync() on all ranks or on none, for the same batches.",),
        **_place(facts, wait, passed),
    )


def uneven_inputs(facts: Facts) -> Verdict | None:
    """A rank ran out of data, and the others wait for it in a step that it never began."""
    at_end = tuple(rank for rank in facts.awaited if _is_at_its_end(facts.ranks.get(rank)))
    wait = facts.wait_for(at_end)
    if wait is None:
        return None
    missed = wait.missed_by(at_end)
    ended = tuple(rank for rank in at_end if facts.ranks[rank].liveness == "ended")
    steps = {rank: one.steps_done for rank, one in facts.ranks.items()}
    short = ", ".join(f"rank {rank} after {steps[rank]} steps" for rank in at_end[:4] if steps[rank])
    call = facts.ranks[at_end[0]].exit_call
    how = "left the training loop" if call is None else f"exited with status {call.status}{at(call.call_site)}"
    few = 2 * len(at_end) < len(facts.world)
    return Verdict(
        kind="uneven inputs",
        sentence=f"{capitalised(ranks_text(at_end))} {how}{f' ({short})' if short else ''}, and "
        f"{ranks_text(facts.waiting)} {verb(facts.waiting, 'waits', 'wait')} for {verb(at_end, 'it', 'them')}"
        f"{in_step(missed)}: {collective_text(missed)}{at(missed.call_site)}.",
        blamed=at_end if few and len(facts.world) > 2 else (),
        concerned=tuple(sorted({*at_end, *facts.waiting})),
        evidence=(f"{capitalised(ranks_text(ended))} ended without an error.",)
        if ended
        else (f"{capitalised(ranks_text(at_end))} {verb(at_end, 'is', 'are')} past the training loop.",),
        alternative="" if ended else _alternative(facts),
        advice=(
            "Give all ranks the same number of batches (drop_last, DistributedSampler), or train inside join().",
            "If it was a break or an early stop: let the ranks agree on it, with an all_reduce of the decision.",
        ),
        **_place(facts, wait, at_end),
    )


def waits_for_data(facts: Facts) -> Verdict | None:
    """A rank that the others wait for has been in its data loader all along."""
    ranks = tuple(rank for rank in _culprits(facts) if waits_for(facts.ranks[rank].stacks) == "data loader")
    return _held_up(
        facts,
        ranks,
        "waits for data",
        f"{verb(ranks, 'has', 'have')} been waiting for data",
        "Look at the data loader of that rank: its workers, its storage, a lock; py-spy dump shows where it is.",
    )


def stuck(facts: Facts) -> Verdict | None:
    """A rank that the others wait for is stuck elsewhere; or all have entered and nothing happens."""
    ranks = _culprits(facts)
    if ranks:
        silent = all(facts.ranks[rank].liveness == "silent" for rank in ranks if rank in facts.ranks)
        what = f"{verb(ranks, 'has', 'have')} made no progress"
        if silent:
            what = f"{verb(ranks, 'has', 'have')} been unreachable (process, host or network gone)"
        elif is_busy(facts.ranks[ranks[0]]):
            what = f"{verb(ranks, 'has', 'have')} been busy without getting anywhere"
        elif (waiting := waits_for(facts.ranks[ranks[0]].stacks)) is not None:
            what = f"{verb(ranks, 'has', 'have')} been {_WAITING[waiting]}"
        return _held_up(facts, ranks, "stuck", what, "Look at that rank's stacks, or run py-spy dump on its process.")
    return _all_inside(facts)


def _culprits(facts: Facts) -> tuple[int, ...]:
    return tuple(
        rank
        for rank in facts.awaited
        if rank in facts.ranks
        and facts.is_stuck(rank)
        and not facts.is_only_slow(rank)
        and facts.ranks[rank].liveness not in ("ended",)
    )


def _alternative(facts: Facts) -> str:
    """What else a standstill may be. Ranks that waited until their time was up have waited for too long in any case."""
    if facts.evidence.is_live:
        return _MAY_GO_ON
    return "" if any(is_timeout(one.failure) for one in facts.ranks.values()) else _MIGHT_HAVE_GONE_ON


def _all_inside(facts: Facts) -> Verdict | None:
    """All ranks are in the same collective and it does not end."""
    stuck = [rank for rank in facts.blocked if facts.is_stuck(rank)]
    if len(stuck) < len(facts.ranks) or not stuck:
        return None
    group, entry = facts.blocked[stuck[0]]
    if any(other[0].name != group.name or other[1].number != entry.number for other in facts.blocked.values()):
        return None
    return Verdict(
        kind="stuck",
        sentence=f"All ranks that left a log have entered collective {entry.number} of {group_text(group)}"
        f"{in_step(entry)} ({collective_text(entry)}{at(entry.call_site)}); it never completed.",
        concerned=tuple(stuck),
        step=loop_step(entry),
        group=group.name,
        number=entry.number,
        bucket=entry.signature.bucket if entry.signature.bucket != NO_BUCKET else None,
        parameters=entry.signature.parameters,
        windows={rank: group.windows[rank] for rank in stuck[:8]},
        alternative=_alternative(facts),
        evidence=("They agree on all collectives up to there, so no rank's order is at fault.",),
        advice=("Look at the network between the hosts, and at the backend's own log (NCCL_DEBUG=INFO).",),
    )


def _held_up(facts: Facts, ranks: tuple[int, ...], kind: FaultKind, what: str, advice: str) -> Verdict | None:
    wait = facts.wait_for(ranks)
    if not ranks or wait is None:
        return None
    one, missed = facts.ranks[ranks[0]], wait.missed_by(ranks)
    place = _place(facts, wait, ranks)
    if one.standing is not None:
        place["step"] = loop_step(one.standing)
    since = f" for {seconds_text(one.idle_ns)}" if one.idle_ns else ""
    where = f" ({standing_text(one.standing)})" if one.standing else ""
    evidence = []
    if one.liveness == "unknown":
        evidence.append("Whether the processes still run is unknown from here.")
    if one.cpu_share is not None:
        evidence.append(f"Rank {ranks[0]} uses {100 * one.cpu_share:.0f} % of a core.")
    return Verdict(
        kind=kind,
        sentence=f"{capitalised(ranks_text(ranks))} {what}{since}{where}, while {ranks_text(facts.waiting)} "
        f"{verb(facts.waiting, 'waits', 'wait')} in collective {missed.number} of {group_text(wait.group)}: "
        f"{collective_text(missed)}{at(missed.call_site)}.",
        blamed=ranks,
        concerned=tuple(sorted({*ranks, *facts.waiting})),
        evidence=tuple(evidence),
        advice=(advice,),
        alternative=_alternative(facts),
        **place,
    )


def _never_ready(
    facts: Facts, ranks: tuple[int, ...], unready: tuple[UnreadyParameter, ...], wait: Wait | None, *, is_over: bool
) -> Verdict:
    """What is said of it.

    Args:
        ranks: all with the same parameters.
        is_over: their backward has certainly ended.
    """
    one, everywhere = facts.ranks[ranks[0]], len(ranks) == len(facts.world) > 1
    bucket = unready[0].bucket
    inside = [parameter for parameter in unready if parameter.bucket == bucket]
    names = tuple(parameter.name for parameter in unready)
    modules = sorted({parameter.module for parameter in unready})
    where = sorted({parameter.module for parameter in inside})
    step = wait.missed_by(ranks).step if wait else one.standing.loop_step if one.standing else None
    if wait is None and step and _has_complained(one):
        step -= 1  # DDP complains in the forward of the next one
    who = capitalised(ranks_text(ranks))
    not_launched = f"{who} never launched" if is_over else f"{who} {verb(ranks, 'has', 'have')} not launched"
    if everywhere:
        not_launched = f"No rank {'launched' if is_over else 'has launched'}"
    whom = ""
    if facts.waiting:
        waits = verb(facts.waiting, "waits", "wait")
        whom = f", so {ranks_text(facts.waiting)} {waits} for {verb(ranks, 'it', 'them')}"
    site = one.failure.call_site if one.failure is not None else one.standing.call_site if one.standing else None
    place = (_place(facts, wait, ranks) if wait else {"step": step}) | {"bucket": bucket, "parameters": names}
    if not place.get("call_sites") and site is not None:
        place["call_sites"] = {ranks[0]: site}
    return Verdict(
        kind="gradients never ready",
        sentence=f"{not_launched} bucket {bucket}"
        f"{f' of step {step}' if step is not None else ''}{whom}: {len(inside)} of its parameters "
        f"{'got' if is_over else 'have'} no gradient ({some([p.name for p in inside])}; in {some(where)})"
        f"{_frozen_text(inside, ranks, step)}.",
        alternative="" if is_over else f"the backward of {ranks_text(ranks)} may not have been over",
        blamed=() if everywhere else ranks,
        concerned=tuple(sorted({*ranks, *facts.waiting})),
        evidence=(
            f"The backward of {ranks_text(ranks)} {'left' if is_over else verb(ranks, 'has', 'have')} {len(names)} "
            f"parameters without a gradient: {some(names)}.",
        ),
        advice=(
            ("Pass find_unused_parameters=True, or leave what forward does not use out of the model.",)
            if everywhere
            else (
                "Use the same branches of the model on all ranks, or pass find_unused_parameters=True.",
                f"Look at what forward does with {some(modules)} on {ranks_text(ranks)}.",
            )
        ),
        **place,
    )


def _frozen_text(unready: Sequence[UnreadyParameter], ranks: tuple[int, ...], step: int | None) -> str:
    """Which of these were frozen after they had been given to DDP, as seen in this step or when DDP complained."""
    frozen = [p.name for p in unready if p.frozen_in is not None and step is not None and 0 <= p.frozen_in - step <= 1]
    if not frozen:
        return ""
    return (
        f": {some(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen on {ranks_text(ranks)} (requires_grad is False)"
    )


def _unready(one: RankEvidence) -> tuple[UnreadyParameter, ...]:
    """The parameters without a gradient, if others of the same model have theirs: else the backward had not begun."""
    by_model: dict[int, list[UnreadyParameter]] = {}
    for parameter in one.unready:
        by_model.setdefault(parameter.model, []).append(parameter)
    sizes = {model.model: len(model.parameters) for model in one.models}
    for model, parameters in sorted(by_model.items()):
        if len(parameters) < sizes.get(model, len(parameters) + 1):
            return tuple(sorted(parameters, key=lambda parameter: parameter.bucket))
    return ()


def _others_have_the_bucket(facts: Facts, rank: int, unready: UnreadyParameter) -> bool:
    """Whether others launched the bucket where this rank has something else, or nothing yet."""
    for group in facts.evidence.groups:
        own = group.windows.get(rank, ())
        number = group.newest.get(rank, 0) + 1
        if group.first_divergence is not None:
            number = group.first_divergence
        if any(entry.number == number and entry.signature.bucket != NO_BUCKET for entry in own):
            continue
        for other, window in group.windows.items():
            for entry in window:
                signature = entry.signature
                is_it = signature.bucket != NO_BUCKET and signature.model == unready.model
                if other != rank and entry.number == number and is_it and signature.bucket <= unready.bucket:
                    return True
    return False


def _is_at_its_end(one: RankEvidence | None) -> bool:
    if one is None or one.failure is not None or one.exit_status:
        return False
    return one.liveness == "ended" or (
        one.standing is not None
        and one.standing.phase in (None, "data_wait")
        and _END_OF_SCRIPT.search(one.stacks) is not None
    )


def _place(facts: Facts, wait: Wait, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a verdict that say where the others wait."""
    missed = wait.missed_by(ranks)
    sites = {rank: s.call_site for rank in ranks if rank in facts.ranks and (s := facts.ranks[rank].standing)}
    sites |= {one.rank: one.entry.call_site for one in facts.waits[:8]}
    signature = missed.signature
    shown = [rank for rank in (*ranks[:4], *facts.waiting[:4]) if rank in wait.group.windows]
    return {
        "step": loop_step(missed),
        "group": wait.group.name,
        "number": missed.number,
        "bucket": signature.bucket if signature.bucket != NO_BUCKET else None,
        "parameters": signature.parameters,
        "call_sites": {rank: site for rank, site in sorted(sites.items()) if site} or None,
        "windows": {rank: wait.group.windows[rank] for rank in sorted(shown)},
    }
