"""Fallback rules, for when no other rule finds a fault: slow, healthy, or can't tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from overlapscope.diagnosis.evidence import GroupOrder, RankEvidence
from overlapscope.diagnosis.refutations import SILENT_FAULTS
from overlapscope.diagnosis.rules import processes, replicas
from overlapscope.diagnosis.stall_timeout import is_busy, stall_timeout_ns
from overlapscope.diagnosis.text import (
    at_line,
    capitalize,
    collective_text,
    format_position,
    format_seconds,
    group_text,
    in_step,
    loop_step,
    plural,
    rank_list,
)
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority

_SLOW_AFTER_NS: Final = 1_000_000_000
_SLOW_AFTER_STEPS: Final = 3
_MAX_GAPS: Final = 3
_REPORTABLE_KINDS: Final[dict[str, FaultKind]] = {
    "stopped": "stopped",
    "holds the GIL": "holds the GIL",
    "waits for data": "waits for data",
    "gradients never ready": "gradients never ready",
    "stuck": "stuck",
    "killed": "killed",
    "out of memory": "out of memory",
    "uneven inputs": "uneven inputs",
    "batch skipped": "batch skipped",
    "step behind": "step behind",
    "not reduced": "not reduced",
    "replicas differ": "replicas differ",
    "swapped collectives": "swapped collectives",
    "missing collective": "missing collective",
    "different collectives": "different collectives",
    "models differ": "models differ",
    "settings differ": "settings differ",
}


def find_watchdog_report(facts: Facts) -> Verdict | None:
    """Return what a watchdog reported while the job ran, if the job did not end well: some faults leave no trace."""
    has_ended_well = {*facts.ranks_with_liveness("ended"), *facts.unrecorded} == set(facts.world)
    reports = [
        report
        for report in facts.evidence.reports
        if report.kind in _REPORTABLE_KINDS
        and (not has_ended_well or (report.kind in SILENT_FAULTS and not report.alternative))
    ]
    if not reports:
        return None
    first = min(reports, key=lambda report: report.time_ns)
    who = f"The watchdog of rank {first.rank} reported this while the job ran."
    rule = {"stopped": processes.find_stopped_process, "holds the GIL": processes.find_gil_holder}.get(first.kind)
    named = first.blamed or first.suspected
    known = tuple(rank for rank in named if rank in facts.ranks and facts.ranks[rank].position)
    if rule is not None and known and (found := rule(facts, known)) is not None:
        # Its own log is more precise about where the rank was than what others last heard from it.
        return replace(found, evidence=(*found.evidence, who))
    return Verdict(
        kind=_REPORTABLE_KINDS[first.kind],
        sentence=first.sentence,
        alternative=first.alternative,
        blamed=first.blamed,
        suspected=first.suspected,
        concerned=tuple(sorted({*named, *(report.rank for report in reports)})),
        step=first.step,
        bucket=first.bucket,
        call_sites=first.call_sites or None,
        evidence=(who,),
    )


def find_uneven_finish(facts: Facts) -> Verdict | None:
    """Find ranks that finished although not all of them reached the latest collective of a group."""
    have_ended = len(facts.ranks_with_liveness("ended")) == len(facts.ranks) > 0
    is_all_known = not facts.evidence.gaps and not facts.unrecorded
    if not (have_ended and is_all_known) or any(one.was_signaled for one in facts.ranks.values()):
        return None
    for group in facts.evidence.groups:
        there = {rank: group.latest.get(rank, 0) for rank in group.ranks if rank in facts.ranks}
        least, most = min(there.values(), default=0), max(there.values(), default=0)
        if least == most:
            continue
        behind = tuple(rank for rank, latest in there.items() if latest == least)  # others have entered some more
        ahead = next(rank for rank, latest in there.items() if latest == most)
        further = [entry for entry in group.windows.get(ahead, ()) if entry.number > least]
        if not further or all(entry.state == "completed" for entry in further):
            continue  # like the root of a broadcast, which waits for nobody
        first = further[0]
        return Verdict(
            kind="missing collective",
            sentence=f"{capitalize(rank_list(behind))} finished after collective {least} of {group_text(group)} "
            f"and never entered the next one, which rank {ahead} launched{in_step(first)}: "
            f"{collective_text(first)}{at_line(first.call_site)}.",
            blamed=find_minority([behind, [rank for rank in there if rank not in behind]], len(group.ranks)),
            concerned=tuple(sorted({*behind, ahead})),
            step=loop_step(first),
            group=group.name,
            number=first.number,
            call_sites={ahead: first.call_site} if first.call_site else None,
            windows={rank: group.windows[rank] for rank in (*behind[:4], ahead) if rank in group.windows},
            evidence=("Their logs don't say why: an exception that the script caught, or a loop that was left.",),
            advice=("Log exceptions where they are caught, and end the process with an exit status that says so.",),
        )
    return None


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
            where = f" ({format_position(one.position)})" if one.position else ""
            busy = ", and busy" if is_busy(one) else ""
            waiting = rank_list(facts.waiting)
            return Verdict(
                kind="slow",
                sentence=f"Rank {rank} is slow{busy}: nothing has come to an end there for {format_seconds(one.idle_ns)}"
                f"{where}, and {waiting} {plural(facts.waiting, 'waits', 'wait')} for it.",
                alternative="an endless loop looks the same until it has lasted for long" if busy else "",
                concerned=(rank,),
                step=one.position.loop_step if one.position else None,
                call_sites={rank: one.position.call_site} if one.position and one.position.call_site else None,
            )
    return _late(facts)


def _late(facts: Facts) -> Verdict | None:
    """Find a rank that waited for long, while those it waits for make progress or wait for ranks they just reached."""
    wait = next((wait for wait in facts.waits if facts.is_stuck(wait.rank)), None)
    going = () if wait is None else tuple(rank for rank in facts.awaited or wait.late if _goes_on(facts, rank))
    if wait is None or not going:
        return None
    one = facts.ranks[going[0]]
    where = f" ({format_position(one.position)})" if one.position else ""
    is_moving = all((facts.ranks[rank].idle_ns or 0) < stall_timeout_ns(facts.ranks[rank]) for rank in going)
    goes_on = f", and {plural(going, 'goes', 'go')} on" if is_moving else ""
    return Verdict(
        kind="slow",
        sentence=f"{capitalize(rank_list(going))} {plural(going, 'is', 'are')} slow{goes_on}{where}: rank {wait.rank} "
        f"has waited for {format_seconds(facts.ranks[wait.rank].idle_ns or 0)} in {collective_text(wait.entry)}"
        f"{at_line(wait.entry.call_site)}.",
        concerned=(*going, wait.rank),
        step=one.position.loop_step if one.position else None,
        call_sites={one.rank: one.position.call_site} if one.position and one.position.call_site else None,
    )


def _goes_on(facts: Facts, rank: int) -> bool:
    one = facts.ranks.get(rank)
    is_known = one is not None and one.liveness in ("running", "sleeping") and one.idle_ns is not None
    return is_known and not facts.is_stuck(rank)


def _slow_device(facts: Facts, one: RankEvidence, idle_ns: int) -> Verdict:
    wait = next(wait for wait in facts.device_waits if one.rank in wait.late)
    entry = wait.entry
    return Verdict(
        kind="slow",
        sentence=f"The device of rank {one.rank} is slow: for {format_seconds(idle_ns)} it has not come to collective "
        f"{entry.number} of {group_text(wait.group)}{in_step(entry)}, in which that of rank {wait.rank} waits: "
        f"{collective_text(entry)}{at_line(entry.call_site)}.",
        alternative="a kernel that never ends looks the same until it has lasted for long",
        concerned=(one.rank,),
        step=loop_step(entry),
        call_sites={one.rank: entry.call_site} if entry.call_site else None,
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
    compared, groups = _compared(facts), _counted(facts.evidence.groups)
    if facts.evidence.gaps:
        return _incomplete(facts, going)
    if facts.unrecorded:
        return Verdict(
            kind="cannot tell",
            sentence=f"Nothing is wrong in what was recorded, but {rank_list(facts.unrecorded)} "
            f"{plural(facts.unrecorded, 'was', 'were')} not recorded to the end. "
            f"The order of collectives is the same on all ranks as far as it is known ({compared:,} in {groups}).",
            concerned=going,
        )
    is_over = len(facts.ranks_with_liveness("ended")) == len(facts.ranks)
    if is_over and facts.evidence.job_status:
        return Verdict(
            kind="cannot tell",
            sentence=f"All ranks finished without an error that was seen, but the command {_ended_with(facts)}. "
            f"{compared:,} collectives in {groups} are the same on all ranks.",
            concerned=going,
            advice=("Look at the command's output: what failed is not in what its ranks have recorded.",),
        )
    what = "All ranks finished" if is_over else "Healthy so far"
    return Verdict(
        kind="healthy",
        sentence=f"{what}: {format_compared(facts)}.",
        concerned=going,
        evidence=tuple(replicas.note_replica_comparison(facts)),
    )


def format_compared(facts: Facts) -> str:
    """Format what is the same on all ranks, if nothing differs: part of a sentence."""
    if not facts.evidence.groups:
        return "no collectives were launched" + (
            ", only sends and receives" if facts.evidence.point_to_point_orders else ""
        )
    return f"{_compared(facts):,} collectives in {_counted(facts.evidence.groups)} are the same on all ranks"


def _compared(facts: Facts) -> int:
    return sum(
        min([*group.latest.values(), *(group.latest.get(rank, 0) for rank in facts.unrecorded)], default=0)
        for group in facts.evidence.groups
    )


def _ended_with(facts: Facts) -> str:
    status = facts.evidence.job_status or 0
    return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"


def _counted(groups: Sequence[GroupOrder]) -> str:
    return "1 group" if len(groups) == 1 else f"{len(groups)} groups"


def _incomplete(facts: Facts, going: tuple[int, ...]) -> Verdict:
    """Return the verdict that nothing is wrong in the available parts, but some are missing or damaged."""
    compared = [group for group in facts.evidence.groups if len(group.latest) > 1]
    number = sum(min(group.latest.values()) for group in compared)
    sides = {tuple(sorted(group.latest)) for group in compared}
    where = rank_list(next(iter(sides))) if len(sides) == 1 else "their ranks"
    agreed = f" What is there agrees: {number:,} collectives in {_counted(compared)} are the same on {where}."
    return Verdict(
        kind="cannot tell",
        sentence=f"Whether anything is wrong can't be told, because {format_gaps(facts)}{agreed if number else ''}",
        concerned=going,
        advice=gap_advice(facts),
    )


def format_gaps(facts: Facts) -> str:
    """Format what is missing or damaged: the end of a sentence."""
    gaps = facts.evidence.gaps
    sentences = "; ".join(gap.what for gap in gaps[:_MAX_GAPS])
    if len(gaps) > _MAX_GAPS:
        sentences += f"; and {len(gaps) - _MAX_GAPS} more"
    return f"part of the recording is missing or damaged: {sentences}."


def gap_advice(facts: Facts) -> tuple[str, ...]:
    """Return advice on what is missing or damaged."""
    return tuple(dict.fromkeys(gap.advice for gap in facts.evidence.gaps))


def judge_undecided(facts: Facts) -> Verdict:
    """Return the verdict that processes did not finish, and nothing that they left says why."""
    if not facts.ranks:
        return Verdict(kind="cannot tell", sentence="No rank left anything to judge by.")
    gone, failed = facts.ranks_with_liveness("gone"), facts.ranks_with_liveness("failed")
    unknown = tuple(
        rank
        for rank in facts.ranks_with_liveness("unknown", "silent")
        if rank not in facts.unrecorded and not facts.ranks[rank].is_end_unreadable
    )
    if gone and len(gone) == len(facts.ranks):
        return Verdict(
            kind="killed",
            sentence="All ranks were killed without logging an error; their logs don't say why, or which died first."
            if len(gone) > 1
            else f"Rank {gone[0]} was killed without logging an error.",
            concerned=gone,
            step=max((one.position.loop_step for one in facts.ranks.values() if one.position), default=None),
            evidence=("The order of their collectives is the same as far as they got.",),
            advice=("Look at the launcher's output, and for the OOM killer in dmesg.",),
        )
    sentences = [
        f"{rank_list((wait.rank,))} waits for {rank_list(wait.late)} in {group_text(wait.group)}"
        for wait in facts.waits[:4]
    ]
    if facts.possibly_waiting:
        waiting = facts.possibly_waiting
        sentences.append(
            f"{rank_list(waiting)} {plural(waiting, 'is', 'are')} in a collective, and whether "
            f"{rank_list(facts.unrecorded)} {plural(facts.unrecorded, 'has', 'have')} reached it is unknown"
        )
    if failed:
        sentences.append(f"{rank_list(failed)} failed as if another rank had died")
    if gone:
        sentences.append(f"{rank_list(gone)} {plural(gone, 'is', 'are')} gone")
    if unknown:
        what = plural(unknown, "it died or is running", "they died or are running")
        sentences.append(f"{rank_list(unknown)} left logs that were never closed, so {what} elsewhere")
    sentence = "; ".join([*sentences, ""]) + "the order of their collectives is the same as far as it is known."
    lacking = f" {capitalize(format_gaps(facts))}" if facts.evidence.gaps else ""
    return Verdict(
        kind="cannot tell",
        sentence=capitalize(sentence) + lacking,
        concerned=tuple(sorted(facts.ranks)),
        advice=gap_advice(facts),
    )
