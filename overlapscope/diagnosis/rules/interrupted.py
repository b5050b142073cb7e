"""Rule for jobs that were ended from outside: by Ctrl-C, a scheduler, or a launcher that was signaled."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM
from typing import Final

from overlapscope.diagnosis.evidence import Failure, RankEvidence
from overlapscope.diagnosis.rules import replicas
from overlapscope.diagnosis.rules.fallback import format_compared
from overlapscope.diagnosis.stall_timeout import STUCK_AFTER_NS, stall_timeout_ns
from overlapscope.diagnosis.texts import processes as text
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts, Wait

_FROM_OUTSIDE: Final = (-SIGINT, -SIGTERM, -SIGHUP)
"""Exit statuses from signals that are not sent because of a fault of the process."""
_SIGNAL_TOLERANCE_NS: Final = 500_000_000
"""Time by which a signal to all processes of a terminal may reach some before ``record`` notes it, on a busy host."""


def find_interruption(facts: Facts) -> Verdict | None:
    """Find a signal from outside that ended all ranks, none of which had failed or hung before."""
    ranks = facts.ranks
    if facts.evidence.is_live or facts.missing or not ranks or _has_finished(facts):
        return None
    if not all(one.liveness in ("ended", "failed", "gone") for one in ranks.values()):
        return None
    since_ns = _since_ns(facts)
    if not all(_is_explained(one, since_ns) for one in ranks.values()) or _was_faulty_before(facts, since_ns):
        return None
    steps = [one.position.step for one in ranks.values() if one.position is not None]
    step, what, quiet_ns = max(steps, default=None), _who_ended_it(facts), _quiet_ns(facts, since_ns)
    kind: FaultKind = "cannot tell"
    if facts.evidence.gaps:
        words = text.interrupted_with_gaps(what, step, facts.evidence.gaps)
    elif facts.unrecorded:
        words = text.interrupted_unrecorded(what, step, facts.unrecorded)
    elif quiet_ns >= max([STUCK_AFTER_NS, *map(stall_timeout_ns, ranks.values())]):
        words = text.interrupted_in_silence(what, step, quiet_ns)
    else:
        kind, words = "interrupted", text.interrupted(what, step, compared=format_compared(facts))
    return Verdict(kind=kind, **words, concerned=tuple(sorted(ranks)), step=step)


def _has_finished(facts: Facts) -> bool:
    """Return True if the job ended normally nevertheless, like one that ignores Ctrl-C or saves its work and stops."""
    return not facts.evidence.job_status and len(facts.ranks_with_liveness("ended")) == len(facts.ranks)


def _since_ns(facts: Facts) -> int | None:
    """Return when the first signal was received, if times of ranks are comparable."""
    if facts.evidence.job_signaled_ns is not None:
        return facts.evidence.job_signaled_ns - _SIGNAL_TOLERANCE_NS
    if len({one.host for one in facts.ranks.values()}) > 1:
        return None
    return min([ns for one in facts.ranks.values() if (ns := _signaled_ns(one)) is not None], default=None)


def _signaled_ns(one: RankEvidence) -> int | None:
    """Return when a rank received the signal, on its own clock."""
    caught_ns = one.failure.time_ns if one.failure is not None and _is_interrupt(one.failure) else 0
    return min([ns for ns in (one.signaled_at_ns, caught_ns) if ns], default=None)


def _is_explained(one: RankEvidence, since_ns: int | None) -> bool:
    """Return True if a rank ended by a signal from outside, or after it."""
    if one.failure is None and (one.was_signaled or one.exit_status in _FROM_OUTSIDE):
        return True
    if _is_interrupt(one.failure):
        return True
    return since_ns is not None and one.ended_ns is not None and one.ended_ns >= since_ns


def _is_interrupt(failure: Failure | None) -> bool:
    return failure is not None and failure.type == "KeyboardInterrupt"


def _was_faulty_before(facts: Facts, since_ns: int | None) -> bool:
    """Return True if the job had hung, or had been found to do harm."""
    if facts.was_reported_before(since_ns) or replicas.find_unreduced_gradients(facts) is not None:
        return True
    return any(_has_waited_for_long(facts, wait, since_ns) for wait in facts.waits)


def _has_waited_for_long(facts: Facts, wait: Wait, since_ns: int | None) -> bool:
    """Return True if a rank had waited for longer before the signal than counts as slow, or if that is unknown."""
    one = facts.ranks[wait.rank]
    until_ns = since_ns if since_ns is not None else _signaled_ns(one)
    waited_ns = one.idle_ns if until_ns is None else until_ns - wait.entry.announced_ns
    return waited_ns is None or waited_ns > stall_timeout_ns(one)


def _quiet_ns(facts: Facts, since_ns: int | None) -> int:
    """Return how long nothing had been recorded when the job was signaled; 0 if that is unknown."""
    if since_ns is None:
        return 0
    times = [one.position.since_ns for one in facts.ranks.values() if one.position is not None]
    for group in facts.evidence.groups:
        times += [max(e.announced_ns, e.completed_ns or 0) for w in group.windows.values() for e in w[-1:]]
    return since_ns - max(filter(None, times), default=since_ns)  # before the first event there is no time


def _who_ended_it(facts: Facts) -> str:
    """Return who ended what, by which signal, as far as known."""
    ranks, number = facts.ranks.values(), facts.evidence.job_signal
    if number is not None:
        return text.ended_by_signal([number])
    if any(_is_interrupt(one.failure) for one in ranks):
        return text.keyboard_interrupt()
    if any(one.was_signaled for one in ranks):
        signals = {one.signal_received for one in ranks if one.was_signaled and one.signal_received is not None}
        return text.ended_by_launcher(facts.ranks.keys(), signals)
    return text.ended_by_signal(
        sorted({-one.exit_status for one in ranks if one.exit_status in _FROM_OUTSIDE and one.exit_status})
    )
