"""Rules for processes that failed, exited, were killed, or don't run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from overlapscope.diagnosis.evidence import JOINING, STARTING, CallSite, Failure, RankEvidence
from overlapscope.diagnosis.failures import (
    find_unreachable_address,
    has_own_failure,
    is_consequence,
    is_disagreement,
    is_interrupted,
    is_memory_failure,
    is_timeout,
)
from overlapscope.diagnosis.process_state import was_aborted_by_native_thread
from overlapscope.diagnosis.texts import processes as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts

_NEARLY_ALL_MEMORY: Final = 0.9
_SAME_TIME_NS: Final = 1_000_000_000


def find_failure(facts: Facts) -> Verdict | None:
    """Find an exception that is not the consequence of another rank's end."""
    own = _find_own_failures(facts)
    if not own:
        return None
    first = min(own, key=lambda rank: own[rank].time_ns)
    one, failure = facts.ranks[first], own[first]
    is_memory = is_memory_failure(failure)
    rest = [rank for rank, other in sorted(facts.ranks.items()) if is_consequence(other.failure)]
    return Verdict(
        kind="out of memory" if is_memory else "failed",
        **text.failed(
            [rank for rank in own if own[rank].type == failure.type],
            one,
            failure,
            consequences=[facts.ranks[rank] for rank in rest],
            is_memory=is_memory,
            memory=[facts.ranks[rank] for rank in own] if is_memory else [],
            is_alike=own.keys() == {*facts.world}
            and len({(failed.type, failed.call_site) for failed in own.values()}) == 1,
        ),
        blamed=_unless_all(facts, own, failure),
        concerned=(*own, *rest),
        step=_step_of(one),
        call_sites=known_sites({rank: failed.call_site for rank, failed in own.items()}),
    )


def _find_own_failures(facts: Facts) -> dict[int, Failure]:
    return {
        rank: one.failure
        for rank, one in sorted(facts.ranks.items())
        if one.failure and has_own_failure(one) and one.failure.type != "SystemExit"
    }


def find_error_exit(facts: Facts) -> Verdict | None:
    """Find ranks whose exit status indicates a failure, although no exception ended them."""
    own = _find_own_exits(facts)
    if not own:
        return None
    first = min(own, key=lambda rank: facts.ranks[rank].ended_ns or 0)
    one = facts.ranks[first]
    is_memory = one.exit_call is not None and is_memory_failure(one.exit_call.caught)
    rest = [rank for rank, other in sorted(facts.ranks.items()) if _ended_as_consequence(other)]
    signaled = [rank for rank in rest if _was_only_signaled(facts.ranks[rank])]
    return Verdict(
        kind="out of memory" if is_memory else "failed",
        **text.exited(
            [rank for rank in own if facts.ranks[rank].exit_status == one.exit_status],
            one,
            failed=[rank for rank in rest if rank not in signaled],
            signaled=signaled,
            is_memory=is_memory,
            is_end_known=not any(facts.ranks[rank].is_end_lost for rank in own),
        ),
        blamed=_unless_all(facts, own),
        concerned=tuple(sorted({*own, *rest})),
        step=_step_of(one),
        call_sites=known_sites({first: _exit_line(one)}),
    )


def _find_own_exits(facts: Facts) -> list[int]:
    exited = [rank for rank, one in sorted(facts.ranks.items()) if _has_exited_with_an_error(one)]
    return [rank for rank in exited if not _may_be_consequence(facts, rank)]


def _has_exited_with_an_error(one: RankEvidence) -> bool:
    """Return True unless the error is because another rank had ended, or because the rank was signaled to end."""
    caught = one.exit_call.caught if one.exit_call is not None else None
    is_status = one.exit_status is not None and one.exit_status > 0
    return is_status and one.failure is None and not one.was_signaled and not is_consequence(caught)


def _may_be_consequence(facts: Facts, rank: int) -> bool:
    """Return True if a status is all that is known of a rank's end, and it may have ended because of another one.

    A rank that was in a collective may have ended with that. One whose record is lost counts if others wait for it:
    a rank that ends because another one has done so was in a collective, as a rule.
    """
    one = facts.ranks[rank]
    if one.exit_call is not None or one.ended_ns is not None:
        return False
    if rank in facts.blocked or facts.is_uncertain(rank):
        return True
    return one.is_end_lost and rank not in facts.awaited


def _exit_line(one: RankEvidence) -> CallSite | None:
    return one.exit_call.call_site if one.exit_call is not None else None


def _was_only_signaled(one: RankEvidence) -> bool:
    return one.was_signaled and one.failure is None


def _ended_as_consequence(one: RankEvidence) -> bool:
    """Return True if a rank ended because another one had."""
    caught = one.exit_call.caught if one.exit_call is not None else None
    return one.was_signaled or is_consequence(one.failure) or is_consequence(caught)


def find_stopped_process(facts: Facts, ranks: tuple[int, ...] | None = None) -> Verdict | None:
    """Find ranks stopped by a signal or a debugger.

    Args:
        ranks: ranks for which this is known; by default determined from their liveness.
    """
    stopped = facts.ranks_with_liveness("stopped") if ranks is None else ranks
    if not stopped:
        return None
    words = text.stopped(stopped, facts.ranks[stopped[0]], facts.waiting)
    return Verdict(kind="stopped", **words, **_state_fields(facts, stopped))


def find_gil_holder(facts: Facts, ranks: tuple[int, ...] | None = None) -> Verdict | None:
    """Find ranks whose process runs while none of its Python threads does.

    Args:
        ranks: ranks for which this is known; by default determined from their current state.
    """
    holding = ranks or tuple(
        rank for rank, one in sorted(facts.ranks.items()) if one.holds_gil and one.liveness in ("running", "sleeping")
    )
    if not holding:
        return None
    words = text.holds_gil(holding, facts.ranks[holding[0]], facts.waiting, is_live=facts.evidence.is_live)
    return Verdict(kind="holds the GIL", **words, **_state_fields(facts, holding))


def _state_fields(facts: Facts, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a verdict on processes that don't run Python code, located by the first."""
    return {
        "blamed": ranks,
        "concerned": tuple(sorted({*ranks, *facts.waiting})),
        **_location(facts.ranks[ranks[0]]),
    }


def find_killed_process(facts: Facts) -> Verdict | None:
    """Find ranks that are gone without logging an error, while others are alive or failed because of that."""
    gone = _find_gone(facts)
    others = [rank for rank in facts.ranks if rank not in gone]
    if not gone or _died_of_something_else(facts, gone, others):
        return None
    first = _first_to_die(facts, gone)
    died = [facts.ranks[rank] for rank in first]
    consequences = [rank for rank in others if is_consequence(facts.ranks[rank].failure)]
    return Verdict(
        kind="killed",
        **text.killed(
            died,
            out_of_memory=[one.rank for one in died if _memory_share(one) >= _NEARLY_ALL_MEMORY],
            consequences=[facts.ranks[rank] for rank in consequences],
            later=[rank for rank in gone if rank not in first],
            has_survivors=bool(others),
            may_not_match=all(_may_be_aborted_for_its_size(facts, rank) for rank in first),
        ),
        blamed=_without_victims(facts, first),
        concerned=tuple(sorted({*gone, *consequences})),
        **_location(*died),
    )


def _without_victims(facts: Facts, gone: tuple[int, ...]) -> tuple[int, ...]:
    """Return whom to blame: nobody if all are gone; if nobody saw their exits, those that others wait for.

    torchrun may have ended the others.
    """
    ranks = [facts.ranks[rank] for rank in gone]
    if len(gone) == len(facts.world):
        return ()
    if len(gone) == 1 or any(one.exit_status for one in ranks) or not any(one.is_launched for one in ranks):
        return gone
    return tuple(rank for rank in gone if rank in facts.awaited)


def _may_be_aborted_for_its_size(facts: Facts, rank: int) -> bool:
    """Return True if a thread of gloo may have ended a rank because it received more than it expected."""
    group, _ = facts.blocked.get(rank, (None, None))
    is_over_gloo = group is not None and group.backend.startswith("gloo")
    return is_over_gloo and was_aborted_by_native_thread(facts.ranks[rank].stacks)


def _died_of_something_else(facts: Facts, gone: tuple[int, ...], others: list[int]) -> bool:
    """Return True if ranks were still there when others gave up, or someone ended, or may have, a job that hung."""
    have_joined = any((one := facts.ranks[rank].position) is None or one.phase != STARTING for rank in gone)
    if have_joined and any(is_timeout(facts.ranks[rank].failure) for rank in others):
        return True  # a rank that dies closes its connections: a timeout means waiting for one that was still there
    if _may_be_only_what_is_left(facts, gone):
        return True
    hung = [rank for rank in gone if facts.had_hung(rank)]
    is_harmless = all(facts.ranks[rank].liveness == "ended" for rank in others)
    # If nobody was harmed, the watchdogs' reports say more than the end of a rank.
    return len(hung) == len(gone) or (is_harmless and bool(hung or facts.evidence.reports))


def _may_be_only_what_is_left(facts: Facts, gone: tuple[int, ...]) -> bool:
    """Return True if a rank whose end nobody knows may have ended first, or hung, and these were ended for that.

    Unless somebody saw the signal that killed them, or lost the connection to a rank.
    """
    others = [one for rank, one in facts.ranks.items() if rank not in gone]
    has_lost = bool(facts.missing) or any(one.liveness == "unknown" or _is_lost(facts, one.rank) for one in others)
    is_seen = any((facts.ranks[rank].exit_status or 0) < 0 for rank in gone)
    return has_lost and not is_seen and not any(_reports_dead_peer(one) for one in others)


def _find_gone(facts: Facts) -> tuple[int, ...]:
    """Return the ranks that are gone and may have been killed."""
    gone = tuple(rank for rank in facts.ranks_with_liveness("gone") if _may_have_been_killed(facts.ranks[rank]))
    if any(_reports_dead_peer(one) for one in facts.ranks.values()):
        # Nobody can check the ranks of which nothing is known, but a connection was closed.
        unknown = facts.ranks_with_liveness("unknown", "silent")
        gone = gone or tuple(rank for rank in unknown if not _is_lost(facts, rank))
    # A parent process that saw an exit status knows more than peers that lost the connection.
    return tuple(rank for rank in gone if facts.ranks[rank].exit_status) or gone


def _is_lost(facts: Facts, rank: int) -> bool:
    """Return True if what a rank recorded of its end is missing here, so that it may have ended in any way."""
    return facts.ranks[rank].is_end_lost or facts.is_uncertain(rank)


def find_killed_at_shutdown(facts: Facts) -> Verdict | None:
    """Find ranks that reached the end of their script, and died of a signal while Python shut down."""
    own = [
        rank
        for rank in facts.ranks_with_liveness("ended")
        if (facts.ranks[rank].exit_status or 0) < 0 and not facts.ranks[rank].was_signaled
    ]
    if not own:
        return None
    rest = [rank for rank, one in sorted(facts.ranks.items()) if one.was_signaled]
    return Verdict(
        kind="killed",
        **text.killed_at_shutdown(own, facts.ranks[own[0]], rest),
        blamed=tuple(own) if len(own) < len(facts.world) else (),
        concerned=tuple(sorted({*own, *rest})),
    )


def _may_have_been_killed(one: RankEvidence) -> bool:
    """Return True if a rank was not ended by its launcher, and did not exit with a status."""
    return not one.was_signaled and (one.exit_status is None or one.exit_status < 0)


def _reports_dead_peer(one: RankEvidence) -> bool:
    has_never_met = not one.steps_done and find_unreachable_address(one.failure)
    is_other = is_timeout(one.failure) or is_interrupted(one.failure) or has_never_met
    return is_consequence(one.failure) and not is_other


def _first_to_die(facts: Facts, gone: tuple[int, ...]) -> tuple[int, ...]:
    """Return ranks whose last sign of life is the oldest; if that is unknown, those that the others waited for."""
    ages = {rank: facts.ranks[rank].silent_for_ns for rank in gone}
    known = [age for age in ages.values() if age is not None]
    if len(known) < len(gone):
        return tuple(rank for rank in gone if rank in facts.awaited) or gone
    return tuple(rank for rank in gone if (ages[rank] or 0) >= max(known) - _SAME_TIME_NS)


def _memory_share(one: RankEvidence) -> float:
    return one.rss_bytes / one.memory_limit_bytes if one.rss_bytes and one.memory_limit_bytes else 0.0


def _unless_all(facts: Facts, ranks: Iterable[int], failure: Failure | None = None) -> tuple[int, ...]:
    """Return the ranks to blame: none if the same happened to all, or if they failed because ranks disagree."""
    blamed = () if failure is not None and is_disagreement(failure) else tuple(ranks)
    return () if len(blamed) == len(facts.world) > 1 else blamed


def _location(*ranks: RankEvidence) -> dict[str, Any]:
    """Return the fields of a verdict that locate ranks: the step and bucket of the first, and the line of each."""
    positions = {one.rank: one.position for one in ranks if one.position}
    return {
        "step": _step_of(ranks[0]),
        "bucket": ranks[0].position.bucket if ranks[0].position else None,
        "call_sites": known_sites({rank: position.call_site for rank, position in positions.items()}),
    }


def _step_of(one: RankEvidence) -> int | None:
    if one.position is None or one.position.phase in (STARTING, JOINING):
        return None
    return one.position.loop_step
