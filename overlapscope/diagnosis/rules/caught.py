"""Rule for a rank that others wait for after an exception that did not end its process.

The exception ended a thread or a child process that the rank waits for, was caught and the loop left, or is caught and
raised again for ever. Most exceptions of that kind do no harm. So it has to be the last thing that its rank did, and it
must not have gone well with other ranks, or with itself before.
"""

from __future__ import annotations

from typing import Any, Final

from overlapscope.diagnosis.evidence import CaughtError, Entry, RankEvidence
from overlapscope.diagnosis.failures import is_consequence, is_memory_failure
from overlapscope.diagnosis.process_state import find_wait_reason
from overlapscope.diagnosis.rules.waiting import wait_fields
from overlapscope.diagnosis.stall_timeout import stall_timeout_ns
from overlapscope.diagnosis.text import loop_step
from overlapscope.diagnosis.texts import caught as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, has_finished

_AGAIN: Final = 3
"""Number of times in one step from which an exception counts as raised again and again."""
_ENDS_A_THREAD: Final = ("thread", "process")
_ELSEWHERE: Final = ("thread", "process", "data loader")
"""What a rank waits for if something else than its main thread has to go on."""


def find_caught_error(facts: Facts) -> Verdict | None:
    """Find ranks that others wait for since an exception that they have survived."""
    found = {rank: error for rank in facts.awaited if (error := find_cause(facts, rank)) is not None}
    wait = facts.wait_for(found)
    if wait is None:
        return None
    first = min(found, key=lambda rank: found[rank].failure.time_ns)
    one, error = facts.ranks[first], found[first]
    is_again = error.count_in_step >= _AGAIN
    location = wait_fields(facts, wait, tuple(found))
    if one.position is not None:
        location["step"] = loop_step(one.position)
    location["call_sites"] |= known_sites({rank: each.failure.call_site for rank, each in found.items()})
    is_memory = is_memory_failure(error.failure)
    return Verdict(
        kind="out of memory" if is_memory else "failed",
        **text.caught(
            [rank for rank in found if found[rank].failure.type == error.failure.type],
            one,
            error,
            facts.waiting,
            wait,
            is_again=is_again,
            is_live=facts.evidence.is_live,
            is_memory=is_memory,
            gave_up=facts.timed_out_ranks,
            gave_up_ns=facts.gave_up_ns.get(first),
        ),
        blamed=tuple(found) if len(found) < len(facts.world) else (),
        concerned=tuple(sorted({*found, *facts.waiting})),
        **location,
    )


def note_caught_errors(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return what ranks that are named have caught before it began, or shortly before they were heard of last.

    For any verdict that does not say so.
    """
    if not verdict.is_fault:
        return ()
    ranks = [rank for rank in verdict.named if rank in facts.ranks]
    found = ((rank, find_last(facts, rank) or _find_pass(facts, rank, verdict.step)) for rank in ranks)
    return tuple(
        text.caught_before(facts.ranks[rank], error)
        for rank, error in found
        if error is not None and error.failure.type not in verdict.sentence
    )


def find_cause(facts: Facts, rank: int) -> CaughtError | None:
    """Return the exception since which a rank, that others wait for, has done nothing else."""
    one = facts.ranks.get(rank)
    if one is None or facts.is_uncertain(rank) or (one.failure is not None and not is_consequence(one.failure)):
        return None
    likely = [each for each in one.caught if _is_last(facts, one, each) and not _is_harmless(facts, one, each)]
    again = [each for each in likely if each.count_in_step >= _AGAIN]
    if not _is_held_up(facts, one, is_again=bool(again)):
        return None
    return max(again or likely, key=_sort_key, default=None)


def _is_held_up(facts: Facts, one: RankEvidence, *, is_again: bool) -> bool:
    """Return True if a rank has held up others for too long; one that tries again need not stand still."""
    if is_again and facts.held_up_ns(one.rank) >= stall_timeout_ns(one):
        return True
    return facts.is_stuck(one.rank) and (is_again or not facts.is_only_slow(one.rank))


def _sort_key(error: CaughtError) -> tuple[Any, ...]:
    """Return the sort key of exceptions that may belong together: the first has a cause, later ones handle it."""
    is_known = error.failure.call_site is not None
    return is_known, error.how in _ENDS_A_THREAD, error.last_step or 0, -error.failure.time_ns


def find_last(facts: Facts, rank: int) -> CaughtError | None:
    """Return the latest exception that a rank has caught in the step in which it was heard of last."""
    position = facts.ranks[rank].position
    return None if position is None else _find_since(facts, rank, position.step - 1)


def find_before(facts: Facts, rank: int, entry: Entry, step: int | None) -> CaughtError | None:
    """Return an exception that a rank has caught in a step, or in the one before, and before it launched an entry.

    One that it caught after that may be of the collective itself, which does not fit what others have launched.
    """
    error = None if step is None else _find_since(facts, rank, step - 1, until=step)
    return error if error is not None and error.failure.time_ns <= entry.announced_ns else None


def describe(facts: Facts, rank: int, error: CaughtError) -> str:
    """Return a sentence about what a rank has caught."""
    return text.caught_before(facts.ranks[rank], error)


def _find_pass(facts: Facts, rank: int, step: int | None) -> CaughtError | None:
    """Return an exception that came out of a pass of a rank in this step or any before, and was caught."""
    error = None if step is None else _find_since(facts, rank, 0, until=step)
    return error if error is not None and error.how in ("forward", "backward") else None


def _find_since(facts: Facts, rank: int, step: int, *, until: int | None = None) -> CaughtError | None:
    one = facts.ranks[rank]
    likely = [
        each
        for each in one.caught
        if not is_consequence(each.failure)
        and (each.last_step is None or each.last_step >= step)
        and (until is None or (each.step is not None and step <= each.step <= until))
        and not _is_harmless(facts, one, each)
    ]
    return max(likely, key=_sort_key, default=None)


def _is_last(facts: Facts, one: RankEvidence, error: CaughtError) -> bool:
    """Return True if a rank may have done nothing since an exception, or may wait for what it has ended."""
    if is_consequence(error.failure) or one.position is None:
        return False
    has_launched_since = _latest_launch_ns(facts, one.rank) > error.last_ns
    waits_elsewhere = find_wait_reason(one.stacks) in _ELSEWHERE
    if error.how in _ENDS_A_THREAD or error.how == "future" or error.process:
        if waits_elsewhere or (has_finished(one) and error.how in _ENDS_A_THREAD):
            return True
        if error.last_step is None:  # child processes know no step
            return not has_launched_since
        return one.position.step - error.last_step in (0, 1)
    if error.last_step != one.position.step or has_launched_since:
        return False
    return error.count_in_step >= _AGAIN or one.position.since_ns <= error.last_ns


def _latest_launch_ns(facts: Facts, rank: int) -> int:
    groups = (*facts.evidence.groups, *facts.evidence.point_to_point_orders)
    latest = (facts.latest(group, rank) for group in groups)
    return max((entry.announced_ns for entry in latest if entry is not None), default=0)


def _is_harmless(facts: Facts, one: RankEvidence, error: CaughtError) -> bool:
    """Return True if the same exception did no harm to another rank, or to this one in earlier steps."""
    alike = [
        other
        for rank, another in facts.ranks.items()
        if rank not in facts.awaited and another is not one
        for other in another.caught
        if _is_same(other, error)
    ]
    if error.count_in_step >= _AGAIN:
        has_been_as_often = error.count >= 2 * error.count_in_step
        return has_been_as_often or any(other.count_in_step >= error.count_in_step for other in alike)
    return bool(alike) or _has_gone_on(one, error)


def _has_gone_on(one: RankEvidence, error: CaughtError) -> bool:
    """Return True if a rank has ended steps after the same exception."""
    if error.how not in _ENDS_A_THREAD:
        return error.count > error.count_in_step
    before = (other.last_step for other in one.caught if other is not error and _is_same(other, error))
    return error.last_step is not None and any(step is not None and step < error.last_step - 1 for step in before)


def _is_same(one: CaughtError, other: CaughtError) -> bool:
    return (one.failure.type, one.failure.call_site) == (other.failure.type, other.failure.call_site)
