"""Fallback rules, for when no other rule finds a fault: slow, healthy, or can't tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, get_args

from overlapscope.diagnosis.evidence import GroupOrder, RankEvidence, ReportedVerdict
from overlapscope.diagnosis.refutations import SILENT_FAULTS
from overlapscope.diagnosis.rules import processes, replicas, waiting
from overlapscope.diagnosis.stall_timeout import is_busy, stall_timeout_ns
from overlapscope.diagnosis.text import loop_step
from overlapscope.diagnosis.texts import processes as process_text
from overlapscope.diagnosis.texts import waiting as text
from overlapscope.diagnosis.verdict import FaultKind, Verdict, VerdictText, known_sites
from overlapscope.diagnosis.wait_graph import Facts, find_minority
from overlapscope.text import rank_list

_SLOW_AFTER_NS: Final = 1_000_000_000
_SLOW_AFTER_STEPS: Final = 3
_NOT_REPORTABLE: Final = (
    "healthy",
    "slow",
    "interrupted",
    "cannot tell",
    "failed",
    "never started",
    "wrong world size",
)
"""Kinds of reports that are no fault, or that leave a trace in any case."""
_STALLS: Final = {
    "waits for data": (waiting.find_data_loader_wait,),
    "stuck": (waiting.find_data_loader_wait, waiting.find_stuck_rank),
}
_KINDS: Final[dict[str, FaultKind]] = {kind: kind for kind in get_args(FaultKind)}
_NO_FAULTS: Final = ("healthy", "slow", "interrupted", "cannot tell")


def find_watchdog_report(facts: Facts) -> Verdict | None:
    """Return what a watchdog reported while the job ran, if the job did not end well: some faults leave no trace."""
    has_ended_well = {*facts.ranks_with_liveness("ended"), *facts.unrecorded} == set(facts.world)
    reports = [
        report
        for report in facts.evidence.reports
        if _is_reportable(facts, report)
        and (not has_ended_well or (report.kind in SILENT_FAULTS and not report.alternative))
    ]
    if not reports:
        return None
    first = min(reports, key=lambda report: report.time_ns)
    if (found := _located(facts, first)) is not None:
        return found
    return Verdict(
        kind=_KINDS[first.kind],
        sentence=first.sentence,
        alternative=first.alternative,
        blamed=first.blamed,
        suspected=first.suspected,
        concerned=tuple(sorted({*first.blamed, *first.suspected, *(report.rank for report in reports)})),
        step=first.step,
        bucket=first.bucket,
        call_sites=first.call_sites,
        evidence=(text.reported_by(first.rank),),
    )


def _is_reportable(facts: Facts, report: ReportedVerdict) -> bool:
    """Return True if a report is of a fault that may have left no other trace, or whose trace is lost."""
    may_be_lost = bool(facts.evidence.gaps) or any(one.is_end_lost for one in facts.ranks.values())
    return report.kind in _KINDS and report.kind not in (_NO_FAULTS if may_be_lost else _NOT_REPORTABLE)


def _located(facts: Facts, report: ReportedVerdict) -> Verdict | None:
    """Return a reported verdict with the position from the rank's own log, more precise than what others heard."""
    rule = {"stopped": processes.find_stopped_process, "holds the GIL": processes.find_gil_holder}.get(report.kind)
    named = report.blamed or report.suspected
    known = tuple(rank for rank in named if rank in facts.ranks and facts.ranks[rank].position)
    found = rule(facts, known) if rule is not None and known else None
    for stall in _STALLS.get(report.kind, ()) if found is None else ():  # it lasted for longer than until the report
        if (one := stall(facts)) is not None and {*one.blamed} == {*named}:
            found = one
            break
    return None if found is None else replace(found, evidence=(*found.evidence, text.reported_by(report.rank)))


def find_uneven_finish(facts: Facts) -> Verdict | None:
    """Find ranks that finished although not all of them reached the latest collective of a group."""
    have_ended = len(facts.ranks_with_liveness("ended")) == len(facts.ranks) > 0
    is_all_known = not facts.evidence.gaps and not facts.unrecorded
    if not (have_ended and is_all_known) or any(one.was_signaled for one in facts.ranks.values()):
        return None
    return next((found for group in facts.evidence.groups if (found := _uneven_finish_in(facts, group))), None)


def _uneven_finish_in(facts: Facts, group: GroupOrder) -> Verdict | None:
    there = facts.latest_numbers(group)
    least, most = min(there.values(), default=0), max(there.values(), default=0)
    behind = tuple(rank for rank, latest in there.items() if latest == least)  # others have entered some more
    ahead = next((rank for rank, latest in there.items() if latest == most > least), None)
    if ahead is None:
        return None
    further = [entry for entry in group.windows.get(ahead, ()) if entry.number > least]
    if all(entry.state == "completed" for entry in further):
        return None  # like the root of a broadcast, which waits for nobody
    first = further[0]
    return Verdict(
        kind="missing collective",
        **text.uneven_finish(group, behind, least, ahead, first),
        blamed=find_minority([behind, there.keys() - behind], len(group.ranks)),
        concerned=tuple(sorted({*behind, ahead})),
        step=loop_step(first),
        group=group.name,
        number=first.number,
        call_sites=known_sites({ahead: first.call_site}),
        windows=group.windows_of((*behind[:4], ahead)),
    )


def find_slow_rank(facts: Facts) -> Verdict | None:
    """Find a rank that others wait for, but not long enough to call it stuck."""
    if not facts.evidence.is_live:
        return None
    for rank in (*facts.awaited, *facts.late_devices):
        one = facts.ranks.get(rank)
        if one is None or one.idle_ns is None:
            continue
        if facts.stalled_ns(one) >= max(_SLOW_AFTER_NS, _SLOW_AFTER_STEPS * (one.step_time_ns or 0)):
            if rank in facts.late_devices:
                return _slow_device(facts, one, one.idle_ns)
            words = text.slow(one, one.idle_ns, facts.waiting, is_busy=is_busy(one))
            return Verdict(kind="slow", **words, concerned=(rank,), **_position_fields(one))
    return _late(facts)


def _position_fields(one: RankEvidence) -> dict[str, Any]:
    """Return the fields of a verdict that locate a rank."""
    position = one.position
    return {
        "step": position.loop_step if position else None,
        "call_sites": known_sites({one.rank: position.call_site if position else None}),
    }


def _late(facts: Facts) -> Verdict | None:
    """Find a rank that waited for long, while those it waits for make progress or wait for ranks they just reached."""
    wait = next((wait for wait in facts.waits if facts.is_stuck(wait.rank)), None)
    going = [] if wait is None else [rank for rank in facts.awaited or wait.late if _goes_on(facts, rank)]
    if wait is None or not going:
        return None
    members = [facts.ranks[rank] for rank in going]
    waited_ns = facts.waited_ns(wait)
    is_moving = all((one.idle_ns or 0) < min(stall_timeout_ns(one), waited_ns // 2) for one in members)
    words = text.late(going, members[0].position, wait, waited_ns, is_moving=is_moving)
    return Verdict(kind="slow", **words, concerned=(*going, wait.rank), **_position_fields(members[0]))


def _goes_on(facts: Facts, rank: int) -> bool:
    one = facts.ranks.get(rank)
    is_known = one is not None and one.liveness in ("running", "sleeping") and one.idle_ns is not None
    return is_known and not facts.is_stuck(rank)


def _slow_device(facts: Facts, one: RankEvidence, idle_ns: int) -> Verdict:
    wait = next(wait for wait in facts.device_waits if one.rank in wait.late)
    return Verdict(
        kind="slow",
        **text.slow_device(one.rank, idle_ns, wait),
        concerned=(one.rank,),
        step=loop_step(wait.entry),
        call_sites=known_sites({one.rank: wait.entry.call_site}),
    )


def judge_healthy(facts: Facts) -> Verdict | None:
    """Return the verdict that all ranks that left something finished or make progress."""
    if not facts.ranks:
        return None
    going = tuple(sorted({*facts.ranks_with_liveness("running", "sleeping", "dumped", "ended"), *facts.unrecorded}))
    if len(going) < len(facts.ranks):
        return None
    if any(facts.is_stuck(rank) and not facts.is_only_slow(rank) for rank in (*facts.waiting, *facts.possibly_waiting)):
        return None
    if facts.evidence.gaps:
        return Verdict(kind="cannot tell", **_incomplete(facts), concerned=going)
    compared = format_compared(facts)
    if facts.unrecorded:
        words = text.not_recorded_to_end(facts.unrecorded, compared)
        return Verdict(kind="cannot tell", **words, concerned=going)
    is_over = len(facts.ranks_with_liveness("ended")) == len(facts.ranks)
    if is_over and facts.evidence.job_status:
        words = text.command_failed(facts.evidence.job_status, compared)
        return Verdict(kind="cannot tell", **words, concerned=going)
    notes = [*replicas.note_replica_comparison(facts), *replicas.note_harmless_updates(facts)]
    return Verdict(kind="healthy", **text.healthy(compared, notes, is_over=is_over), concerned=going)


def format_compared(facts: Facts) -> str:
    """Format what is the same on all ranks, if nothing differs: part of a sentence."""
    if not facts.evidence.groups:
        return text.nothing_compared(has_messages=bool(facts.evidence.point_to_point_orders))
    collectives = sum(
        min([*group.latest.values(), *(group.latest.get(rank, 0) for rank in facts.unrecorded)], default=0)
        for group in facts.evidence.groups
    )
    return text.compared_text(collectives, len(facts.evidence.groups))


def _incomplete(facts: Facts) -> VerdictText:
    """Describe that nothing is wrong in the available parts, but some are missing or damaged."""
    compared = [group for group in facts.evidence.groups if len(group.latest) > 1]
    sides = {tuple(sorted(group.latest)) for group in compared}
    number = sum(min(group.latest.values()) for group in compared)
    on = rank_list(sides.pop()) if len(sides) == 1 else "their ranks"
    return text.incomplete(facts.evidence.gaps, text.compared_text(number, len(compared), on) if number else "")


def judge_undecided(facts: Facts) -> Verdict:
    """Return the verdict that processes did not finish, and nothing that they left says why."""
    if not facts.ranks:
        return Verdict(kind="cannot tell", **text.nothing_left())
    gone = facts.ranks_with_liveness("gone")
    if gone and len(gone) == len(facts.ranks):
        step = max((one.position.loop_step for one in facts.ranks.values() if one.position), default=None)
        return Verdict(kind="killed", **process_text.all_killed(gone), concerned=gone, step=step)
    ended_unseen = [
        rank
        for rank in facts.ranks_with_liveness("unknown", "silent")
        if rank not in facts.unrecorded and not facts.ranks[rank].is_end_lost
    ]
    failed = facts.ranks_with_liveness("failed")
    if not (facts.waits or facts.possibly_waiting or failed or gone or ended_unseen) and facts.evidence.gaps:
        words = _incomplete(facts)
    else:
        words = text.undecided(
            facts.waits,
            possibly_waiting=facts.possibly_waiting,
            unrecorded=facts.unrecorded,
            failed=failed,
            gone=gone,
            unknown=ended_unseen,
            gaps=facts.evidence.gaps,
        )
    return Verdict(
        kind="cannot tell",
        **words,
        concerned=tuple(sorted(facts.ranks)),
    )
