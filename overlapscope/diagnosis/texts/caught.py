"""Texts of exceptions that did not end their rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from overlapscope.diagnosis.evidence import CaughtError, RankEvidence
from overlapscope.diagnosis.text import (
    at_line,
    collective_text,
    exception_text,
    format_position,
    format_seconds,
    group_text,
    in_step,
    plural,
    truncate_words,
)
from overlapscope.diagnosis.verdict import VerdictText
from overlapscope.diagnosis.wait_graph import Wait
from overlapscope.text import capitalize, rank_list

_MAX_LENGTH: Final = 300
_LESS_MEMORY: Final = "Use a smaller batch, accumulate gradients, or checkpoint activations."
_TELL_MAIN_THREAD: Final = (
    "Hand exceptions of threads, tasks and child processes to the main thread, which waits for what they no longer "
    "bring: put them into the queue, call result(), wait with a timeout."
)
_GIVE_UP: Final = "Limit the number of tries, and let the last exception end the process: the others wait meanwhile."
_LET_IT_END: Final = "Let the exception end the process, or have all ranks agree by all_reduce to leave out the step."


def caught(
    ranks: Sequence[int],
    one: RankEvidence,
    error: CaughtError,
    waiting: Collection[int],
    wait: Wait,
    *,
    is_again: bool,
    is_live: bool,
    is_memory: bool,
    gave_up: Collection[int],
    gave_up_ns: int | None,
) -> VerdictText:
    """Describe an exception after which ranks have not gone on, although it did not end them.

    Args:
        ranks: ranks with an exception of this type.
        one: the first of them.
        error: its exception.
        waiting: ranks that wait for them.
        is_again: True if it was raised several times in the step.
        gave_up: ranks that waited for others until their collective timed out.
        gave_up_ns: how long any of them waited for the first of these; None if none did.
    """
    missed = wait.first_missed_by(ranks)
    where = f"in collective {missed.number} of {group_text(wait.group)}"
    if wait.is_point_to_point:  # each rank numbers its own
        where = f"for its message in {group_text(wait.group)}"
    they_wait, after = f"{capitalize(rank_list(waiting))} {plural(waiting, 'waits', 'wait')} for", ""
    if gave_up_ns is not None:
        they_wait, after = (
            f"{capitalize(rank_list(gave_up))} gave up waiting for",
            f" after {format_seconds(gave_up_ns)}",
        )
    sentence = (
        f"{_what_failed(ranks, one, error, is_again=is_again, is_live=is_live)}{at_line(error.failure.call_site)}: "
        f"{_message(error)}. {they_wait} {plural(ranks, 'that rank', 'those ranks')}{in_step(missed)} {where}{after}: "
        f"{collective_text(missed, with_names=False)}{at_line(missed.call_site)}."
    )
    alternative = "the exception may have been handled, and something else may hold the rank up"
    evidence, advice = ["No rank that goes on has seen this exception."], _LET_IT_END
    if is_again:
        later = "a later try may succeed" if is_live else "a later try might have succeeded"
        alternative = later if gave_up_ns is None else ""
        evidence = [f"It was raised at least {error.count_in_step} times in that step, and caught."]
        advice = _GIVE_UP
    elif _is_elsewhere(error):
        advice = _TELL_MAIN_THREAD
    if one.position is not None and (position := format_position(one.position)):
        since = f" for {format_seconds(one.idle_ns)}" if one.idle_ns else ""
        evidence.append(f"Rank {one.rank} {'has been' if is_live else 'was'} {position}{since}.")
    return {
        "sentence": sentence,
        "alternative": alternative,
        "evidence": tuple(evidence),
        "advice": (_LESS_MEMORY, advice) if is_memory else (advice,),
    }


def caught_before(one: RankEvidence, error: CaughtError) -> str:
    """Say what a rank had caught in its last steps."""
    what = _what_failed([one.rank], one, error, is_again=False, is_live=False)
    return f"{what}{at_line(error.failure.call_site)}: {_message(error)}."


def _what_failed(ranks: Sequence[int], one: RankEvidence, error: CaughtError, *, is_again: bool, is_live: bool) -> str:
    """Return who raised it, in which step."""
    who = rank_list(ranks)
    if is_again:
        fails = plural(ranks, "fails", "fail") if is_live else "failed"
        return f"{capitalize(who)} {fails} again and again{_step(one, error)}"
    if error.how == "future":
        return f"A task of {who} failed{_step(one, error)}"
    if error.process:
        return f"Child process '{error.process}' of {who} failed"
    if error.how == "thread":
        return f"Thread '{error.thread}' of {who} failed{_step(one, error)}"
    phase = f" in its {error.how}" if error.how in ("forward", "backward") else ""
    thread = f" in thread '{error.thread}'" if error.thread else ""
    return f"{capitalize(who)} caught an exception{phase}{thread}{_step(one, error)}"


def _step(one: RankEvidence, error: CaughtError) -> str:
    """Return in which step of the user's loop it was raised last; empty if that is unknown."""
    position = one.position
    if error.last_step is None or position is None:
        return ""
    return in_step(position) if error.last_step == position.step else f" in step {error.last_step}"


def _is_elsewhere(error: CaughtError) -> bool:
    return error.how in ("thread", "process", "future") or bool(error.process or error.thread)


def _message(error: CaughtError) -> str:
    return truncate_words(exception_text(error.failure), _MAX_LENGTH).removesuffix(".")
