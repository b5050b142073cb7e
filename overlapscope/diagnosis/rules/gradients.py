"""Rule for gradients missing in a rank's latest backward, so that their bucket was never launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from overlapscope.diagnosis.evidence import (
    CallSite,
    Entry,
    Failure,
    InterruptedBackward,
    RankEvidence,
    UnreadyParameter,
)
from overlapscope.diagnosis.failures import is_consequence
from overlapscope.diagnosis.rules.waiting import wait_fields
from overlapscope.diagnosis.texts import waiting as text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, Wait
from overlapscope.trace.schema import NO_BUCKET

_MOST_RANKS: Final = 4


def interrupted_backward_in(one: RankEvidence, step: int | None) -> InterruptedBackward | None:
    """Return the interrupted backward of a rank in this step, unless the rank may have run another one since."""
    has_run_another = one.position is not None and one.position.phase in ("backward", "finalize", "optimizer")
    return None if has_run_another else next((left for left in one.interrupted_backwards if left.step == step), None)


def note_interrupted_backwards(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return, as evidence for another fault it may explain, the latest interrupted backward of each rank by then."""
    if not verdict.is_fault or verdict.kind == "gradients never ready":
        return ()
    latest = {
        rank: left
        for rank, one in sorted(facts.ranks.items())
        for left in one.interrupted_backwards
        if verdict.step is None or left.step <= verdict.step
    }
    return tuple(text.backward_interrupted(rank, left) for rank, left in list(latest.items())[:_MOST_RANKS])


_BACKWARD: Final = "_engine_run_backward"
"""Function of torch that runs a backward, in a traceback."""
_UNFINISHED_REDUCTION: Final = "Expected to have finished reduction"


def find_missing_gradients(facts: Facts) -> Verdict | None:
    """Find gradients missing in a rank's latest backward, so that their bucket was never launched."""
    found = {rank: left for rank in sorted(facts.ranks) if (left := _missing_gradients_of(facts, rank)) is not None}
    if not found:
        return None
    first, is_over = next(((rank, is_over) for rank, (_, is_over) in found.items() if is_over), (min(found), False))
    unready, _ = found[first]
    alike = tuple(rank for rank, left in found.items() if left == (unready, is_over))
    return _never_ready(facts, alike, unready, facts.wait_for(alike), is_over=is_over)


def _missing_gradients_of(facts: Facts, rank: int) -> tuple[tuple[UnreadyParameter, ...], bool] | None:
    """Return the parameters that a rank's latest backward left without a gradient, and whether it is certainly over."""
    one = facts.ranks[rank]
    unready = _unready(one)
    if not unready or rank in facts.unrecorded or _has_failed_itself(one):
        return None
    has_said_so = _has_complained(one)
    is_awaited = facts.wait_for((rank,)) is not None or _bucket_of_others(facts, rank, unready[0]) is not None
    is_over = one.position is not None and one.position.phase not in ("backward", "finalize", "forward")
    is_over &= not _was_ended_in_backward(one)
    is_over |= interrupted_backward_in(one, _step_of(one)) is not None
    may_be_over = one.liveness == "unknown" and one.idle_ns is None  # its process may have ended there
    is_there = one.liveness not in ("gone", "stopped", "failed") and not may_be_over
    is_there = is_there and facts.is_stuck(rank) and not facts.is_only_slow(rank)
    if has_said_so or (is_awaited and (is_over or is_there)):
        return unready, has_said_so or is_over
    return None


def _failures(one: RankEvidence) -> list[Failure]:
    """Return the exception that ended a rank, and the one that it was handling when it exited."""
    caught = one.exit_call.caught if one.exit_call is not None else None
    return [failure for failure in (one.failure, caught) if failure is not None]


def _has_complained(one: RankEvidence) -> bool:
    """Return True if DDP itself has complained, in the forward of the next step."""
    return any(_UNFINISHED_REDUCTION in failure.message for failure in _failures(one))


def _has_failed_itself(one: RankEvidence) -> bool:
    """Return True if a rank was ended by its own exception: then that is why gradients are missing."""
    return not _has_complained(one) and any(not is_consequence(failure) for failure in _failures(one))


def _was_ended_in_backward(one: RankEvidence) -> bool:
    """Return True if what ended a rank, such as Ctrl-C, was raised in a running backward."""
    return any(_BACKWARD in failure.traceback for failure in _failures(one))


def _never_ready(
    facts: Facts, ranks: tuple[int, ...], unready: tuple[UnreadyParameter, ...], wait: Wait | None, *, is_over: bool
) -> Verdict:
    """Return the verdict.

    Args:
        ranks: ranks that lack the same parameters.
        is_over: True if their backward has certainly ended.
    """
    one = facts.ranks[ranks[0]]
    bucket, step = unready[0].bucket, _step_of(one)
    if (launched := _missed_bucket(facts, ranks, unready[0], wait)) is not None:
        step = launched.step
    is_everywhere = len(ranks) == len(facts.world) > 1
    left = interrupted_backward_in(one, step)
    backward = _line_of_backward(facts, one.rank) if is_over else None
    if left is not None:
        backward = left.call_site
    location: dict[str, Any] = wait_fields(facts, wait, ranks) if wait else {"step": step}
    site = _line_of_fault(one, backward, is_interrupted=left is not None)
    sites: dict[int, CallSite] = location.pop("call_sites", {})
    if site is not None and (is_over or not sites):
        sites |= {one.rank: site}
    return Verdict(
        kind="gradients never ready",
        **text.never_ready(
            ranks,
            bucket,
            step,
            is_everywhere=is_everywhere,
            is_over=is_over,
            waiting=facts.waiting,
            unready=unready,
            frozen=_frozen_in([parameter for parameter in unready if parameter.bucket == bucket], step),
            interrupted=left,
            backward=backward,
        ),
        blamed=() if is_everywhere else ranks,
        concerned=tuple(sorted({*ranks, *facts.waiting})),
        call_sites=sites,
        **location | {"bucket": bucket, "parameters": tuple(one.name for one in unready)},
    )


def _missed_bucket(facts: Facts, ranks: tuple[int, ...], unready: UnreadyParameter, wait: Wait | None) -> Entry | None:
    return wait.first_missed_by(ranks) if wait else _bucket_of_others(facts, ranks[0], unready)


def _line_of_fault(one: RankEvidence, backward: CallSite | None, *, is_interrupted: bool) -> CallSite | None:
    """Return the line of the backward if that is known and DDP has not complained elsewhere; else where the rank is."""
    if backward is not None and (is_interrupted or not _has_complained(one)):
        return backward
    if one.failure is not None:
        return one.failure.call_site
    return one.position.call_site if one.position else None


def _step_of(one: RankEvidence) -> int | None:
    """Return the step of a rank's latest backward, as far as the rank's own evidence tells."""
    step = one.position.loop_step if one.position else None
    if step and _has_complained(one) and not (one.interrupted_backwards and one.interrupted_backwards[-1].step == step):
        return step - 1  # DDP complains in the forward of the next step, unless that is of the same step
    return step


def _line_of_backward(facts: Facts, rank: int) -> CallSite | None:
    """Return where a rank last launched a bucket; it may have continued after the backward with missing gradients."""
    entries = [entry for group in facts.evidence.groups for entry in group.windows.get(rank, ())]
    launched = [entry for entry in entries if entry.signature.bucket != NO_BUCKET and entry.call_site is not None]
    return max(launched, key=lambda entry: entry.announced_ns).call_site if launched else None


def _unready(one: RankEvidence) -> tuple[UnreadyParameter, ...]:
    """Return the parameters without a gradient if others of the model have one: else the backward had not begun."""
    by_model: dict[int, list[UnreadyParameter]] = {}
    for parameter in one.unready:
        by_model.setdefault(parameter.model, []).append(parameter)
    sizes = {model.model: len(model.parameters) for model in one.models}
    for model, parameters in sorted(by_model.items()):
        if len(parameters) < sizes.get(model, len(parameters) + 1):
            return tuple(sorted(parameters, key=lambda parameter: parameter.bucket))
    return ()


def _bucket_of_others(facts: Facts, rank: int, unready: UnreadyParameter) -> Entry | None:
    """Return the bucket if another rank has launched it where this rank has something else, or nothing yet."""
    for group in facts.evidence.groups:
        entries = group.entries_at(group.first_divergence or group.latest.get(rank, 0) + 1)
        own = entries.pop(rank, None)
        if own is not None and own.signature.bucket != NO_BUCKET:
            continue
        for entry in entries.values():
            bucket = entry.signature.bucket
            if bucket != NO_BUCKET and entry.signature.model == unready.model and bucket <= unready.bucket:
                return entry
    return None


def _frozen_in(unready: Sequence[UnreadyParameter], step: int | None) -> list[str]:
    """Return which were frozen after they had been passed to DDP, as seen in this step or when DDP complained."""
    seen = {parameter.name: parameter.frozen_in for parameter in unready if parameter.frozen_in is not None}
    return [] if step is None else [name for name, frozen_in in seen.items() if 0 <= frozen_in - step <= 1]
