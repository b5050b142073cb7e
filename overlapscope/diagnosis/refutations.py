"""Refutations: evidence that rules out a verdict, whichever rule has found it.

Rules state what a verdict requires; this module states what excludes it. ``docs/faults.md`` has both as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.failures import is_consequence
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.collective_log import FAILED

_AWAKE_NS: Final = 2_000_000_000
"""Maximum silence of a watchdog that still runs Python code."""

Refutation = Callable[[Facts, Verdict], bool]


def is_refuted(facts: Facts, verdict: Verdict) -> bool:
    """Return True if the evidence contradicts a verdict."""
    return any(refutes(facts, verdict) for refutes in _REFUTATIONS.get(verdict.kind, ()))


def _named(facts: Facts, verdict: Verdict) -> Iterable[RankEvidence]:
    return (facts.ranks[rank] for rank in verdict.named if rank in facts.ranks)


def _was_unrecorded(facts: Facts, verdict: Verdict) -> bool:
    """Return True if a rank that was not recorded is said not to have done something."""
    return bool(set(verdict.named) & set(facts.unrecorded))


def _did_not_end_well(facts: Facts, verdict: Verdict) -> bool:
    return any(one.failure or one.exit_status or one.was_signaled for one in _named(facts, verdict))


def _was_not_killed(facts: Facts, verdict: Verdict) -> bool:
    return any(
        one.was_signaled or (one.exit_status is not None and one.exit_status >= 0) for one in _named(facts, verdict)
    )


def _has_not_failed(facts: Facts, verdict: Verdict) -> bool:
    return any(
        is_consequence(one.failure) or (one.failure is None and not (one.exit_status or 0) > 0)
        for one in _named(facts, verdict)
        if not one.caught
    )


def _have_completed_together(facts: Facts, _: Verdict) -> bool:
    """Return True if all ranks have completed a collective of one group: then they are one job, whatever they say.

    Unless they have called ``init_process_group`` again since.
    """
    return all(one.init_calls == 1 for one in facts.ranks.values()) and any(
        facts.ranks.keys() <= {*group.ranks}
        and any(one.completed_ns and not one.flags & FAILED for window in group.windows.values() for one in window)
        for group in facts.evidence.groups
        if len(facts.ranks) > 1
    )


def _has_begun(facts: Facts, verdict: Verdict) -> bool:
    return any(group.latest.get(rank) for rank in verdict.named for group in facts.evidence.groups)


def _has_launched_it(facts: Facts, verdict: Verdict) -> bool:
    """Return True if the bucket said never to be ready is in the log; with several models its owner is unknown."""
    return verdict.bucket is not None and any(
        (entry.signature.bucket, entry.step) == (verdict.bucket, verdict.step)
        for one in _named(facts, verdict)
        if len(one.models) == 1
        for group in facts.evidence.groups
        for entry in group.windows.get(one.rank, ())
    )


def _goes_on(facts: Facts, verdict: Verdict) -> bool:
    """Return True if, in a live job, a named rank computes, has ended, or moved a moment ago."""
    if not facts.evidence.is_live:
        return False
    return any(
        one.liveness == "ended" or facts.is_only_slow(one.rank) or not facts.is_stuck(one.rank)
        for one in _named(facts, verdict)
    )


def _runs_again(facts: Facts, verdict: Verdict) -> bool:
    return facts.evidence.is_live and any(one.liveness in ("running", "sleeping") for one in _named(facts, verdict))


def _lets_others_run(facts: Facts, verdict: Verdict) -> bool:
    return facts.evidence.is_live and any(
        not one.holds_gil and one.silent_for_ns is not None and one.silent_for_ns < _AWAKE_NS
        for one in _named(facts, verdict)
    )


def _is_something_wrong(facts: Facts, _: Verdict) -> bool:
    """Return True if something is missing or failed, or was reported and not retracted."""
    evidence = facts.evidence
    ended_badly = any(one.failure or (one.exit_status or 0) > 0 for one in facts.ranks.values())
    is_lacking = bool(evidence.gaps or facts.unrecorded)
    silent = any(report.kind in SILENT_FAULTS and not report.alternative for report in evidence.reports)
    return ended_badly or is_lacking or silent or bool(evidence.job_status) or bool(facts.ranks_with_liveness("gone"))


SILENT_FAULTS: Final[tuple[FaultKind, ...]] = (
    "models differ",
    "settings differ",
    "swapped collectives",
    "step behind",
    "batch skipped",
    "not reduced",
    "not finite",
    "replicas differ",
)
"""Faults with which a job still runs to its end."""

_REFUTATIONS: Final[dict[FaultKind, tuple[Refutation, ...]]] = {
    "healthy": (_is_something_wrong,),
    "uneven inputs": (_was_unrecorded, _did_not_end_well),
    "gradients never ready": (_was_unrecorded, _has_launched_it),
    "waits for data": (_was_unrecorded, _goes_on),
    "stuck": (_was_unrecorded, _goes_on),
    "stopped": (_runs_again,),
    "holds the GIL": (_lets_others_run,),
    "killed": (_was_not_killed,),
    "failed": (_has_not_failed,),
    "out of memory": (_has_not_failed,),
    "never started": (_has_begun,),
    "wrong world size": (_have_completed_together,),
}
