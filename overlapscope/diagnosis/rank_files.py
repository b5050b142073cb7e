"""Reader of the files that one rank left besides its collective logs: its position, state and end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapscope.diagnosis.evidence import (
    JOINING,
    EarlierVerdict,
    Entry,
    LeftBackward,
    Liveness,
    RankEvidence,
    Standing,
    UnreadyParameter,
    Unreduced,
)
from overlapscope.diagnosis.exits import call_site_of, ended_with, exit_call_of, exit_of, failure_of, interrupted_ns
from overlapscope.diagnosis.failures import is_interrupted
from overlapscope.diagnosis.hyperparameters import hyperparameters_of
from overlapscope.diagnosis.patience import ENOUGH_STEPS
from overlapscope.diagnosis.process import is_here, liveness_of, written_ns
from overlapscope.diagnosis.rank_models import models_of, unready_parameters
from overlapscope.diagnosis.rank_replicas import replicas_of
from overlapscope.diagnosis.rank_standing import idle_ns, seen_in_this_standstill, stacks_of, standing_of, with_line
from overlapscope.diagnosis.settings import settings_of
from overlapscope.diagnosis.stacks import has_begun_next
from overlapscope.trace.alive import read_alive_board
from overlapscope.trace.attempts import recorded_ranks
from overlapscope.trace.exits import STATUS_OF_STOPPED, Exit
from overlapscope.trace.folders import is_over, read_json
from overlapscope.trace.format import (
    ALIVE_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    JOINING_FILE,
    LEFT_BACKWARDS_FILE,
    RANK_FILE,
    REPORTS_FILE,
    RUN_FILE,
    UNREDUCED_FILE,
    Flag,
    Kind,
    Phase,
)
from overlapscope.trace.log import Problem, Records, newest_records
from overlapscope.trace.reports import reports_of
from overlapscope.trace.seal import Seal
from overlapscope.trace.signature import NO_BUCKET

_NEWEST_RECORDS: Final = 2048
"""Maximum number of records read from the end of the event log: several steps, even with one record per gradient."""


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Contents of one rank's files."""

    evidence: RankEvidence
    run: dict[str, Any]
    reports: tuple[EarlierVerdict, ...] = ()
    boot: str | None = None
    """Boot ID of the host: ranks with the same one share a clock."""
    alive_ns: int | None = None
    """When its watchdog was last awake."""
    waited_for_all: bool = False
    """True if it waited for all ranks of the job before it began, so that all of them record."""
    problems: list[Problem] = field(default_factory=list)
    seal: Seal
    """File list and checksums written when its recording was complete."""


def state_of(folder: Path) -> Liveness | None:
    """Return the state of a rank's process until it has recorded how it ended; None if it has.

    Logs that are read afterwards go at least as far as the process had got when its state was read.
    """
    if (folder / ENDED_FILE).exists():
        return None
    name = RANK_FILE if (folder / RANK_FILE).exists() else JOINING_FILE
    where = read_json(folder / name, []) if (folder / name).exists() else {}
    return liveness_of(where) if is_here(where) else "unknown"


def is_running(path: Path) -> bool:
    """Return True if a process of a recording exists on this host, without reading its logs."""
    return any(state_of(folder) in ("running", "sleeping", "stopped") for folder in recorded_ranks(path))


def read_rank(
    rank: int,
    folder: Path,
    newest: Entry | None,
    *,
    is_closed: bool,
    state_before: Liveness | None = None,
    exits: Sequence[Exit] = (),
) -> RankFiles:
    """Read the files that one rank left.

    Args:
        exits: exits of processes of the run, as observed by their parents.
        newest: latest collective of the rank.
        is_closed: True if its collective logs are complete, if there are any.
        state_before: ``state_of`` it before its logs were read: if it has ended since, they don't show it.
    """
    problems: list[Problem] = []
    joining = read_json(folder / JOINING_FILE, problems) if (folder / JOINING_FILE).exists() else {}
    has_joined = not joining or newest is not None or (folder / RANK_FILE).exists()
    run, where = (
        (read_json(folder / RUN_FILE, problems), read_json(folder / RANK_FILE, problems))
        if has_joined
        else ({"world_size": joining.get("world_size")}, joining)
    )
    ended = read_json(folder / ENDED_FILE, problems) if (folder / ENDED_FILE).exists() else {}
    has_gone_on = state_before is not None and not is_closed and ended.get("how") != "exception"
    if has_gone_on:
        ended = {}
    unrecorded_because = ended.get("unrecorded_because")
    seal = Seal(folder, problems)
    unready = unready_parameters(folder, seal, problems)  # before the phase is read: the rank may continue meanwhile
    if unrecorded_because is not None:
        unready = ()  # the gradient-ready file is from a step long ago
    records = newest_records(folder / EVENTS_FILE, _NEWEST_RECORDS, problems, is_over=is_over(folder))
    reports = _earlier_verdicts(rank, folder, problems)
    seen = seen_in_this_standstill(folder, records, newest, problems)
    stacks = stacks_of(folder, None if seen is None else seen.stacks)
    unready = tuple(parameter for parameter in unready if not _was_launched(parameter, records))
    is_of_now = seen is not None or not reports
    standing = with_line(
        standing_of(records, newest, interrupted_ns(where, exits)), stacks, reports, is_of_now=is_of_now
    )
    if standing is not None:
        told = failure_of(ended) or exit_call_of(ended) or seen
        of_backward = newest.call_site if newest is not None and newest.signature.bucket != NO_BUCKET else None
        begun = has_begun_next(stacks, of_backward) if told is None else told.has_begun_next
        standing = replace(standing, has_begun_next=begun)
    if not has_joined:
        standing = Standing(
            step=0, phase=JOINING, call_site=call_site_of(joining), since_ns=_int(joining.get("time_ns"), 0)
        )
    if unrecorded_because is not None and standing is not None:
        standing = Standing(step=standing.step)
    if not unrecorded_because and not len(records) and run.get("models") and not (folder / EVENTS_FILE).exists():
        problems.append(Problem("error", f"{folder / EVENTS_FILE}: missing; this rank trained with a model"))
    steps = records[records["kind"] == Kind.STEP]
    alive_ns, rss_bytes, limit_bytes = read_alive_board(folder / ALIVE_FILE, problems)
    if alive_ns is not None:
        alive_ns = max([alive_ns, *(report.time_ns for report in reports)])
    has_ended = (folder / ENDED_FILE).exists()
    own_exit, exit_call = exit_of(where, exits), exit_call_of(ended)
    exit_status = own_exit.status if own_exit is not None else exit_call.status if exit_call is not None else None
    ended_ns, told_ns = written_ns(ended), None if own_exit is None else own_exit.told_ns
    if told_ns is not None and ended_ns is not None and ended_ns < told_ns:  # it was about to exit
        told_ns = None
        if exit_status is not None and exit_status < 0:
            exit_status = None if exit_call is None else exit_call.status
    is_ended_by_watchdog = bool(reports) and exit_status == STATUS_OF_STOPPED
    # A process of torch.multiprocessing.spawn is sent SIGINT when its parent ends, and ignores it.
    if told_ns is None and (is_ended_by_watchdog or ended.get("has_lost_parent") is True):
        told_ns = ended_ns or alive_ns or 0
    liveness = _liveness(ended, where, is_closed=is_closed, has_ended=has_ended)
    if state_before is not None and has_gone_on:
        liveness = state_before
    liveness = ended_with(liveness, exit_status)
    if told_ns is not None and liveness == "ended":
        liveness = "gone"  # its signal handler, or spawn, turned it into a normal exit
    world_size = run.get("world_size")
    evidence = RankEvidence(
        rank=rank,
        host=str(where.get("host", "")),
        pid=_int(where.get("pid"), -1),
        liveness=liveness,
        unrecorded_because=None if unrecorded_because is None else str(unrecorded_because),
        failure=failure_of(ended),
        exit_status=exit_status,
        exit_call=exit_call,
        told_ns=told_ns,
        told_signal=own_exit.told_signal if own_exit is not None and told_ns is not None else None,
        ended_ns=ended_ns,
        is_end_lost=has_ended and not ended and not has_gone_on,
        standing=standing,
        steps_done=max(int(steps["step"][-1]) + 1 if len(steps) else 0, standing.step if standing else 0),
        step_time_ns=int(np.median(steps["end_ns"] - steps["start_ns"])) if len(steps) else None,
        longest_pause_ns=None if seen is None else seen.longest_pause_ns,
        cpu_share=None if seen is None else seen.cpu_share,
        is_working=None if seen is None else seen.is_working,
        rss_bytes=rss_bytes,
        memory_limit_bytes=limit_bytes,
        unready=unready,
        models=models_of(folder, problems),
        settings=settings_of(folder, run if has_joined else joining, problems),
        replicas=replicas_of(folder, problems),
        hyperparameters=hyperparameters_of(folder, problems),
        unreduced=_unreduced(folder / UNREDUCED_FILE, problems),
        left_backwards=_left_backwards(folder / LEFT_BACKWARDS_FILE, problems),
        no_sync_since=_no_sync_since(records),
        world_size=world_size if isinstance(world_size, int) else None,
        stacks=stacks,
    )
    boot = where.get("boot_id")
    if liveness in ("running", "sleeping", "stopped"):
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        joins_ns = now_ns - (standing or Standing(step=0)).since_ns
        is_starting = evidence.steps_done < ENOUGH_STEPS and bool(run.get("models"))
        idle = idle_ns(records, newest, now_ns) if has_joined else joins_ns
        evidence = replace(evidence, idle_ns=idle, is_starting=is_starting)
    elif liveness in ("gone", "unknown") and alive_ns is not None:
        evidence = replace(evidence, idle_ns=idle_ns(records, newest, alive_ns))
    elif evidence.failure is not None and is_interrupted(evidence.failure):
        evidence = replace(evidence, idle_ns=idle_ns(records, newest, evidence.failure.time_ns))
    return RankFiles(
        evidence=evidence,
        run=run,
        reports=reports,
        boot=str(boot) if boot else None,
        alive_ns=alive_ns,
        waited_for_all=bool(joining),
        problems=problems,
        seal=seal,
    )


def _liveness(ended: dict[str, Any], where: dict[str, Any], *, is_closed: bool, has_ended: bool) -> Liveness:
    how = ended.get("how")
    if ended and how != "unrecorded":
        return "failed" if how == "exception" else "ended"
    if is_closed and not ended:
        return "ended"
    if has_ended and not ended:  # it recorded how it ended, but the record is lost
        return "unknown"
    return liveness_of(where) if is_here(where) else "unknown"


def _was_launched(parameter: UnreadyParameter, records: Records) -> bool:
    """Return True if the latest backward launched a parameter's bucket, so its gradient-ready file must be wrong."""
    entered = records["sequence"][(records["kind"] == Kind.ENTER) & (records["index"] == Phase.BACKWARD)]
    if not len(entered):
        return False
    is_launch = (records["kind"] == Kind.LAUNCH) & (records["sequence"] > entered[-1])
    is_it = (records["model"] == parameter.model) & (records["index"] == parameter.bucket)
    return bool((is_launch & is_it).any())


def _unreduced(path: Path, problems: list[Problem]) -> Unreduced | None:
    content = read_json(path, problems) if path.exists() else {}
    if not content:
        return None
    return Unreduced(
        model=_int(content.get("model"), 0), step=_int(content.get("step"), 0), call_site=call_site_of(content)
    )


def _left_backwards(path: Path, problems: list[Problem]) -> tuple[LeftBackward, ...]:
    lines = read_json(path, problems).get("backwards") if path.exists() else None
    known = [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
    return tuple(LeftBackward(step=_int(line.get("step"), -1), call_site=call_site_of(line)) for line in known)


def _no_sync_since(records: Records) -> int | None:
    """Return the value of ``RankEvidence.no_sync_since``."""
    over = records["step"][records["kind"] == Kind.STEP]
    is_pass = (records["kind"] == Kind.PHASE) & (records["index"] == Phase.BACKWARD) & np.isin(records["step"], over)
    passes = records[is_pass]
    reduced = passes["step"][(passes["flags"] & Flag.NO_SYNC) == 0]
    later = passes["step"][passes["step"] > reduced.max()] if len(reduced) else passes["step"]
    return int(later.min()) if len(later) else None


def _earlier_verdicts(rank: int, folder: Path, problems: list[Problem]) -> tuple[EarlierVerdict, ...]:
    """Read the verdicts of a rank's watchdog that were not retracted."""
    found = []
    for report in reports_of(rank, folder, problems):
        if report.retracted_ns is not None:
            continue
        verdict = report.verdict
        try:
            one = EarlierVerdict(
                rank=rank,
                time_ns=report.time_ns,
                kind=report.kind,
                sentence=report.sentence,
                alternative=str(verdict.get("alternative") or ""),
                blamed=tuple(map(int, verdict["blamed"])),
                suspected=tuple(map(int, verdict.get("suspected") or ())),
                step=verdict.get("step"),
                bucket=verdict.get("bucket"),
                call_sites={
                    int(number): site
                    for number, content in (verdict.get("call_sites") or {}).items()
                    if (site := call_site_of(content)) is not None
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            text = f"{folder / REPORTS_FILE}: the verdict of report {report.number} is damaged; it is left out"
            problems.append(Problem("error", text))
        else:
            found.append(one)
    return tuple(found)


def _int(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
