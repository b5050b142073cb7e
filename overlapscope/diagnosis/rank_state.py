"""Reader of the files that one rank left besides its collective logs: its position, state and end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapscope.diagnosis.collective_order import phase_name
from overlapscope.diagnosis.evidence import (
    JOINING,
    Entry,
    InterruptedBackward,
    Liveness,
    RankEvidence,
    RankPosition,
    ReportedVerdict,
    UnreadyParameter,
    UnreducedStep,
)
from overlapscope.diagnosis.failures import is_interrupted
from overlapscope.diagnosis.process_state import (
    combine_liveness_and_status,
    find_exit,
    find_job_signal_ns,
    find_user_line,
    has_begun_next_iteration,
    is_on_this_host,
    parse_call_site,
    parse_exit_call,
    parse_failure,
    parse_written_ns,
    read_liveness,
)
from overlapscope.diagnosis.rank_models import read_models, read_replicas, read_unready_parameters
from overlapscope.diagnosis.rank_settings import read_rank_settings
from overlapscope.diagnosis.replica_drift import read_hyperparameters
from overlapscope.diagnosis.stall_timeout import ENOUGH_STEPS
from overlapscope.trace.event_log import Problem, Records, read_latest_records
from overlapscope.trace.live_files import read_alive_file
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.process_files import (
    WATCHDOG_ABORT_STATUS,
    ProcessExit,
    StallSnapshot,
    read_rank_reports,
    read_stall_snapshot,
)
from overlapscope.trace.schema import (
    ENDED_FILE,
    EVENTS_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    JOINING_FILE,
    LIVENESS_FILE,
    NO_BUCKET,
    NO_INDEX,
    RANK_FILE,
    REPORTS_FILE,
    RUN_FILE,
    STACKS_PATTERN,
    UNREDUCED_FILE,
    Flag,
    Kind,
    Phase,
)
from overlapscope.trace.small_files import find_recorded_ranks, has_finished_recording, read_json

# Last known position of a rank, for how long it was there, and what its watchdog saw, from its files.

_NON_PROGRESS_KINDS: Final = (Kind.PAUSE, Kind.INCIDENT)
"""Kinds of records that don't indicate progress: garbage collection and watchdog reports also occur during a stall."""
_FATAL: Final = "Fatal Python error"
"""Marker of the stacks of a process that aborts."""
_AFTER: Final = dict.fromkeys((Phase.BACKWARD, Phase.FINALIZE, Phase.EVALUATION), "loop")
"""Phase of a rank after a phase has ended and before another begins."""
_BETWEEN_STEPS: Final = (Phase.DATA_WAIT, Phase.LOOP)
"""Phases between steps."""
_MAX_STACKS_BYTES: Final = 64 * 1024


def find_position(records: Records, latest: Entry | None, interrupted_ns: int | None = None) -> RankPosition | None:
    """Return the rank's position: the latest phase it entered; without an event log, that of the latest collective.

    Args:
        interrupted_ns: when the whole job was signaled to end. A wait that ends after that, and before its collective
            is complete, was aborted by the signal, as by a ``KeyboardInterrupt`` that torch.multiprocessing.spawn
            ignores.
    """
    entered = records[records["kind"] == Kind.PHASE_BEGIN]
    if not len(entered):
        if latest is None:
            return None
        return RankPosition(
            step=latest.step, phase=latest.phase, call_site=latest.call_site, since_ns=latest.announced_ns
        )
    enter = entered[-1]
    phase = Phase(int(enter["index"]))
    until_ns = interrupted_ns if latest is not None and latest.state != "completed" else None
    site = latest.call_site if latest and latest.announced_ns >= int(enter["start_ns"]) else None
    step = int(enter["step"])
    if phase in _BETWEEN_STEPS:
        step += 1  # entered after the optimizer step, with its number, but part of the next step
    return RankPosition(
        step=step,
        phase=_AFTER.get(phase) if _is_over(records, enter, until_ns) else phase_name(phase),
        bucket=_next_bucket(records, enter) if phase is Phase.BACKWARD else None,
        call_site=site,
        since_ns=int(enter["start_ns"]),
        is_after_update=step > 0 and phase in (*_BETWEEN_STEPS, Phase.EVALUATION),
    )


def _is_over(records: Records, enter: Any, until_ns: int | None) -> bool:
    """Return True if the phase that was entered has ended; if a time is given, by then."""
    is_end = (records["kind"] == Kind.PHASE) & (records["sequence"] > enter["sequence"])
    is_end &= records["index"] == enter["index"]
    if until_ns is not None:
        is_end &= records["end_ns"] < until_ns
    return bool(is_end.any())


def add_call_site(
    position: RankPosition | None, stacks: str, reports: tuple[ReportedVerdict, ...], *, is_current: bool
) -> RankPosition | None:
    """Add the line that the stacks show, if they were written since the rank reached this position."""
    if position is None or position.call_site is not None:
        return position
    is_since = bool(reports) and reports[-1].time_ns >= position.since_ns
    site = find_user_line(stacks) if is_since or is_current or _FATAL in stacks else None
    return position if site is None else replace(position, call_site=site)


def read_current_stall(
    folder: Path, records: Records, latest: Entry | None, problems: list[Problem]
) -> StallSnapshot | None:
    """Return the last stall snapshot of the watchdog, if there was no activity afterwards."""
    seen = read_stall_snapshot(folder, problems)
    return seen if seen is not None and seen.time_ns >= _newest_ns(records, latest) else None


def compute_idle_ns(records: Records, latest: Entry | None, now_ns: int) -> int:
    """Return how long there has been no activity, or had been when the rank was last heard from."""
    newest_ns = _newest_ns(records, latest)
    return max(0, now_ns - newest_ns) if newest_ns else 0


def read_stacks(folder: Path, seen: str | None) -> str:
    """Return the latest stacks from the watchdog, and those that faulthandler wrote on an abort.

    Args:
        seen: stacks of the current stall snapshot; None if there is none.
    """
    found = {
        int(number): path
        for path in folder.glob(STACKS_PATTERN)
        if (number := path.stem.removeprefix("stacks_")).isdecimal()
    }
    latest = 0 if seen is not None else max(found, default=0)
    wanted = {path for number, path in found.items() if number in (0, latest)}
    texts = []
    for path in sorted(wanted):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                texts.append(file.read(_MAX_STACKS_BYTES))
        except OSError:
            continue
    return "\n".join(text for text in (*texts, seen or "") if text.strip())


def _next_bucket(records: Records, backward: Any) -> int | None:
    """Return the next bucket of a backward; None if it has waited meanwhile: launches since may be out of order."""
    before = records[(records["kind"] == Kind.PHASE_BEGIN) & (records["sequence"] < backward["sequence"])]
    if len(before) and before[-1]["index"] == Phase.FINALIZE:
        return None
    is_launch = (records["kind"] == Kind.LAUNCH) & (records["sequence"] > backward["sequence"])
    launched = records["index"][is_launch & (records["index"] != NO_INDEX)]
    return int(launched.max()) + 1 if len(launched) else 0


def _newest_ns(records: Records, latest: Entry | None) -> int:
    """Return the time of the last activity of the training; 0 if there was none."""
    own = records[~np.isin(records["kind"], _NON_PROGRESS_KINDS)]
    times = [int(own["end_ns"].max())] if len(own) else [0]
    if latest is not None:
        times += [latest.announced_ns, latest.completed_ns or 0]
    return max(times)


_NEWEST_RECORDS: Final = 2048
"""Maximum number of records read from the end of the event log: several steps, even with one record per gradient."""


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Contents of one rank's files."""

    evidence: RankEvidence
    run: dict[str, Any]
    reports: tuple[ReportedVerdict, ...] = ()
    boot: str | None = None
    """Boot ID of the host: ranks with the same one share a clock."""
    alive_ns: int | None = None
    """When its watchdog was last awake."""
    waited_for_all: bool = False
    """True if it waited for all ranks of the job before it began, so that all of them record."""
    problems: list[Problem] = field(default_factory=list)
    seal: Manifest
    """File list and checksums written when its recording was complete."""


def read_process_state(folder: Path) -> Liveness | None:
    """Return the state of a rank's process until it has recorded how it ended; None if it has.

    Logs that are read afterwards go at least as far as the process had got when its state was read.
    """
    if (folder / ENDED_FILE).exists():
        return None
    name = RANK_FILE if (folder / RANK_FILE).exists() else JOINING_FILE
    where = read_json(folder / name, []) if (folder / name).exists() else {}
    return read_liveness(where) if is_on_this_host(where) else "unknown"


def is_running(path: Path) -> bool:
    """Return True if a process of a recording exists on this host, without reading its logs."""
    return any(read_process_state(folder) in ("running", "sleeping", "stopped") for folder in find_recorded_ranks(path))


def read_rank(
    rank: int,
    folder: Path,
    latest: Entry | None,
    *,
    is_closed: bool,
    state_before: Liveness | None = None,
    exits: Sequence[ProcessExit] = (),
) -> RankFiles:
    """Read the files that one rank left.

    Args:
        exits: exits of processes of the run, as observed by their parents.
        newest: latest collective of the rank.
        is_closed: True if its collective logs are complete, if there are any.
        state_before: ``read_process_state`` it before its logs were read: if it has ended since, they don't show it.
    """
    problems: list[Problem] = []
    joining = read_json(folder / JOINING_FILE, problems) if (folder / JOINING_FILE).exists() else {}
    has_joined = not joining or latest is not None or (folder / RANK_FILE).exists()
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
    seal = Manifest(folder, problems)
    unready = read_unready_parameters(
        folder, seal, problems
    )  # before the phase is read: the rank may continue meanwhile
    if unrecorded_because is not None:
        unready = ()  # the gradient-ready file is from a step long ago
    records = read_latest_records(
        folder / EVENTS_FILE, _NEWEST_RECORDS, problems, is_over=has_finished_recording(folder)
    )
    reports = _reported_verdicts(rank, folder, problems)
    seen = read_current_stall(folder, records, latest, problems)
    stacks = read_stacks(folder, None if seen is None else seen.stacks)
    unready = tuple(parameter for parameter in unready if not _was_launched(parameter, records))
    is_current = seen is not None or not reports
    position = add_call_site(
        find_position(records, latest, find_job_signal_ns(where, exits)), stacks, reports, is_current=is_current
    )
    if position is not None:
        end_record = parse_failure(ended) or parse_exit_call(ended) or seen
        of_backward = latest.call_site if latest is not None and latest.signature.bucket != NO_BUCKET else None
        begun = (
            has_begun_next_iteration(stacks, of_backward) if end_record is None else end_record.has_begun_next_iteration
        )
        position = replace(position, has_begun_next_iteration=begun)
    if not has_joined:
        position = RankPosition(
            step=0, phase=JOINING, call_site=parse_call_site(joining), since_ns=_int(joining.get("time_ns"), 0)
        )
    if unrecorded_because is not None and position is not None:
        position = RankPosition(step=position.step)
    if not unrecorded_because and not len(records) and run.get("models") and not (folder / EVENTS_FILE).exists():
        problems.append(Problem("error", f"{folder / EVENTS_FILE}: missing; this rank trained with a model"))
    steps = records[records["kind"] == Kind.STEP]
    alive_ns, rss_bytes, limit_bytes = read_alive_file(folder / LIVENESS_FILE, problems)
    if alive_ns is not None:
        alive_ns = max([alive_ns, *(report.time_ns for report in reports)])
    has_ended = (folder / ENDED_FILE).exists()
    own_exit, exit_call = find_exit(where, exits), parse_exit_call(ended)
    exit_status = own_exit.status if own_exit is not None else exit_call.status if exit_call is not None else None
    ended_ns, signaled_at_ns = parse_written_ns(ended), None if own_exit is None else own_exit.signaled_at_ns
    if signaled_at_ns is not None and ended_ns is not None and ended_ns < signaled_at_ns:  # it was about to exit
        signaled_at_ns = None
        if exit_status is not None and exit_status < 0:
            exit_status = None if exit_call is None else exit_call.status
    is_ended_by_watchdog = bool(reports) and exit_status == WATCHDOG_ABORT_STATUS
    # A process of torch.multiprocessing.spawn is sent SIGINT when its parent ends, and ignores it.
    if signaled_at_ns is None and (is_ended_by_watchdog or ended.get("has_lost_parent") is True):
        signaled_at_ns = ended_ns or alive_ns or 0
    liveness = _liveness(ended, where, is_closed=is_closed, has_ended=has_ended)
    if state_before is not None and has_gone_on:
        liveness = state_before
    liveness = combine_liveness_and_status(liveness, exit_status)
    if signaled_at_ns is not None and liveness == "ended":
        liveness = "gone"  # its signal handler, or spawn, turned it into a normal exit
    world_size = run.get("world_size")
    evidence = RankEvidence(
        rank=rank,
        host=str(where.get("host", "")),
        pid=_int(where.get("pid"), -1),
        liveness=liveness,
        unrecorded_because=None if unrecorded_because is None else str(unrecorded_because),
        failure=parse_failure(ended),
        exit_status=exit_status,
        exit_call=exit_call,
        signaled_at_ns=signaled_at_ns,
        signal_received=own_exit.signal_received if own_exit is not None and signaled_at_ns is not None else None,
        ended_ns=ended_ns,
        is_end_unreadable=has_ended and not ended and not has_gone_on,
        position=position,
        steps_done=max(int(steps["step"][-1]) + 1 if len(steps) else 0, position.step if position else 0),
        step_time_ns=int(np.median(steps["end_ns"] - steps["start_ns"])) if len(steps) else None,
        longest_recovered_stall_ns=None if seen is None else seen.longest_recovered_stall_ns,
        cpu_share=None if seen is None else seen.cpu_share,
        is_working=None if seen is None else seen.is_working,
        rss_bytes=rss_bytes,
        memory_limit_bytes=limit_bytes,
        unready=unready,
        models=read_models(folder, problems),
        settings=read_rank_settings(folder, run if has_joined else joining, problems),
        replicas=read_replicas(folder, problems),
        hyperparameters=read_hyperparameters(folder, problems),
        unreduced=_unreduced(folder / UNREDUCED_FILE, problems),
        interrupted_backwards=_interrupted_backwards(folder / INTERRUPTED_BACKWARDS_FILE, problems),
        no_sync_since=_no_sync_since(records),
        world_size=world_size if isinstance(world_size, int) else None,
        stacks=stacks,
    )
    boot = where.get("boot_id")
    if liveness in ("running", "sleeping", "stopped"):
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        joins_ns = now_ns - (position or RankPosition(step=0)).since_ns
        is_starting = evidence.steps_done < ENOUGH_STEPS and bool(run.get("models"))
        idle = compute_idle_ns(records, latest, now_ns) if has_joined else joins_ns
        evidence = replace(evidence, idle_ns=idle, is_starting=is_starting)
    elif liveness in ("gone", "unknown") and alive_ns is not None:
        evidence = replace(evidence, idle_ns=compute_idle_ns(records, latest, alive_ns))
    elif evidence.failure is not None and is_interrupted(evidence.failure):
        evidence = replace(evidence, idle_ns=compute_idle_ns(records, latest, evidence.failure.time_ns))
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
    return read_liveness(where) if is_on_this_host(where) else "unknown"


def _was_launched(parameter: UnreadyParameter, records: Records) -> bool:
    """Return True if the latest backward launched a parameter's bucket, so its gradient-ready file must be wrong."""
    entered = records["sequence"][(records["kind"] == Kind.PHASE_BEGIN) & (records["index"] == Phase.BACKWARD)]
    if not len(entered):
        return False
    is_launch = (records["kind"] == Kind.LAUNCH) & (records["sequence"] > entered[-1])
    is_it = (records["model"] == parameter.model) & (records["index"] == parameter.bucket)
    return bool((is_launch & is_it).any())


def _unreduced(path: Path, problems: list[Problem]) -> UnreducedStep | None:
    content = read_json(path, problems) if path.exists() else {}
    if not content:
        return None
    return UnreducedStep(
        model=_int(content.get("model"), 0), step=_int(content.get("step"), 0), call_site=parse_call_site(content)
    )


def _interrupted_backwards(path: Path, problems: list[Problem]) -> tuple[InterruptedBackward, ...]:
    lines = read_json(path, problems).get("backwards") if path.exists() else None
    known = [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
    return tuple(
        InterruptedBackward(step=_int(line.get("step"), -1), call_site=parse_call_site(line)) for line in known
    )


def _no_sync_since(records: Records) -> int | None:
    """Return the value of ``RankEvidence.no_sync_since``."""
    over = records["step"][records["kind"] == Kind.STEP]
    is_pass = (records["kind"] == Kind.PHASE) & (records["index"] == Phase.BACKWARD) & np.isin(records["step"], over)
    passes = records[is_pass]
    reduced = passes["step"][(passes["flags"] & Flag.NO_SYNC) == 0]
    later = passes["step"][passes["step"] > reduced.max()] if len(reduced) else passes["step"]
    return int(later.min()) if len(later) else None


def _reported_verdicts(rank: int, folder: Path, problems: list[Problem]) -> tuple[ReportedVerdict, ...]:
    """Read the verdicts of a rank's watchdog that were not retracted."""
    found = []
    for report in read_rank_reports(rank, folder, problems):
        if report.retracted_ns is not None:
            continue
        verdict = report.verdict
        try:
            one = ReportedVerdict(
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
                    if (site := parse_call_site(content)) is not None
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
