"""State of one rank, from the files that it left besides its collective logs: position, process and end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapscope.diagnosis.caught_errors import read_caught_errors
from overlapscope.diagnosis.collective_order import phase_name
from overlapscope.diagnosis.evidence import (
    JOINING,
    LIVE_STATES,
    CreatedGroup,
    Entry,
    InterruptedBackward,
    Liveness,
    NonFiniteGradients,
    RankEvidence,
    RankPosition,
    ReportedVerdict,
    UnreadyParameter,
    UnreducedStep,
)
from overlapscope.diagnosis.failures import is_interrupted
from overlapscope.diagnosis.loop_facts import LoopFacts
from overlapscope.diagnosis.one_job import Lifetime
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
from overlapscope.errors import Problem
from overlapscope.machine.evidence import summarize_log
from overlapscope.trace.event_log import Records
from overlapscope.trace.folders import find_recorded_ranks, has_collective_logs
from overlapscope.trace.json_files import from_dict
from overlapscope.trace.live_files import read_alive_file
from overlapscope.trace.machine_log import read_machine_log
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.process_files import (
    WATCHDOG_ABORT_STATUS,
    ProcessExit,
    StallSnapshot,
    make_foreign_file_problem,
    read_process,
)
from overlapscope.trace.rank_folder import RankFolder
from overlapscope.trace.recording_modes import OFF
from overlapscope.trace.regular_file import match_files, open_regular_file
from overlapscope.trace.schema import (
    CREATED_GROUPS_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    LIVENESS_FILE,
    LOOP_FACTS_FILE,
    NO_BUCKET,
    NO_INDEX,
    NON_FINITE_FILE,
    RANK_FILE,
    REPORTS_FILE,
    SIGNATURES_FILE,
    STACKS_PATTERN,
    UNREDUCED_FILE,
    Flag,
    Kind,
    Phase,
)

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
    position: RankPosition, stacks: str, reports: tuple[ReportedVerdict, ...], *, is_current: bool
) -> RankPosition:
    """Add the line that the stacks show, if they were written since the rank reached this position."""
    if position.call_site is not None:
        return position
    is_since = bool(reports) and reports[-1].time_ns >= position.since_ns
    site = find_user_line(stacks) if is_since or is_current or _FATAL in stacks else None
    return position if site is None else replace(position, call_site=site)


def compute_idle_ns(records: Records, latest: Entry | None, now_ns: int, begun_ns: int | None = None) -> int:
    """Return how long there has been no activity, or had been when the rank was last heard from.

    Args:
        begun_ns: when the rank began, which counts as long as it has done nothing else.
    """
    latest_ns = _latest_ns(records, latest) or begun_ns or 0
    return max(0, now_ns - latest_ns) if latest_ns else 0


def read_stacks(folder: Path, seen: str | None) -> str:
    """Return the latest stacks from the watchdog, and those that faulthandler wrote on an abort.

    Args:
        seen: stacks of the current stall snapshot; None if there is none.
    """
    found = {
        int(number): path
        for path in match_files(folder, STACKS_PATTERN)
        if (number := path.stem.removeprefix("stacks_")).isdecimal()
    }
    latest = 0 if seen is not None else max(found, default=0)
    wanted = {path for number, path in found.items() if number in (0, latest)}
    texts = []
    for path in sorted(wanted):
        try:
            with open_regular_file(path) as file:
                texts.append(file.read(_MAX_STACKS_BYTES).decode(errors="replace"))
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


def _latest_ns(records: Records, latest: Entry | None) -> int:
    """Return the time of the last activity of the training; 0 if there was none."""
    kind = records["kind"]
    is_progress = np.logical_and.reduce([kind != each for each in _NON_PROGRESS_KINDS])
    times = [int(records["end_ns"].max(initial=0, where=is_progress))]
    if latest is not None:
        times += [latest.announced_ns, latest.completed_ns or 0]
    return max(times)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank, as its files show it."""

    evidence: RankEvidence
    run: dict[str, Any]
    reports: tuple[ReportedVerdict, ...] = ()
    boot: str | None = None
    """Boot ID of the host: ranks with the same one share a clock."""
    alive_ns: int | None = None
    """When its watchdog was last awake."""
    lifetime: Lifetime | None = None
    """When it is known to have existed; None if unknown."""
    waited_for_all: bool = False
    """True if it waited for all ranks of the job before it began, so that all of them record."""
    problems: list[Problem] = field(default_factory=list)
    manifest: Manifest
    """File list and checksums written when its recording was complete."""


def read_process_state(path: Path) -> Liveness | None:
    """Return the state of a rank's process until it has recorded how it ended; None if it has.

    Logs that are read afterwards go at least as far as the process had got when its state was read.
    """
    folder = RankFolder(path)
    if folder.has(ENDED_FILE):
        return None
    where = read_process(path)
    return read_liveness(where) if is_on_this_host(where) else "unknown"


def is_running(path: Path) -> bool:
    """Return True if a process of a recording exists on this host, without reading its logs."""
    return any(read_process_state(folder) in LIVE_STATES for folder in find_recorded_ranks(path))


def read_rank(
    rank: int,
    path: Path,
    latest: Entry | None,
    *,
    is_closed: bool,
    state_before: Liveness | None = None,
    exits: Sequence[ProcessExit] = (),
) -> RankState:
    """Read the files that one rank left.

    Args:
        exits: exits of processes of the run, as observed by their parents.
        latest: latest collective of the rank.
        is_closed: True if its collective logs are complete, if there are any.
        state_before: ``read_process_state`` from before its logs were read: if it has ended since, they don't show it.
    """
    folder = RankFolder(path)
    begun = _read_begun(folder, has_launched=latest is not None)
    ended = folder.ended()
    has_gone_on = state_before is not None and not is_closed and ended.get("how") != "exception"
    if has_gone_on:
        ended = {}
    left = _read_left(folder)
    seen = _current_stall(left, latest)
    stacks = read_stacks(path, None if seen is None else seen.stacks)
    alive_ns = _alive_ns(left)
    own_exit = _find_own_exit(ended, begun.where, exits)
    end = _find_end(rank, ended, own_exit, has_report=bool(left.reports), alive_ns=alive_ns)
    is_record_lost = not has_gone_on and not ended and (folder.has(ENDED_FILE) or is_closed)
    state = state_before if has_gone_on and state_before is not None else _recorded_liveness(ended, begun.where)
    if (is_record_lost or _has_lost_logs(folder, begun, ended)) and state not in LIVE_STATES:
        state = "unknown"
    end = replace(end, liveness=_combine(state, end), is_end_lost=is_record_lost)
    position = _find_position(begun, ended, left, latest, exits, seen=seen, stacks=stacks)
    position = _add_rejoining(position, begun.rejoining)
    evidence = replace(_add_files(end, folder, begun, left, position), stacks=stacks)
    if seen is not None:
        evidence = replace(
            evidence,
            longest_recovered_stall_ns=seen.longest_recovered_stall_ns,
            cpu_share=seen.cpu_share,
            is_working=seen.is_working,
        )
    _report_missing_log(folder, begun, left, end)
    _report_missing_signatures(folder, has_launched=latest is not None)
    boot = begun.where.get("boot_id")
    return RankState(
        evidence=_add_idle_time(evidence, begun, left.records, latest, alive_ns),
        run=begun.run,
        reports=left.reports,
        boot=str(boot) if boot else None,
        alive_ns=alive_ns,
        lifetime=_lifetime(begun, evidence, left, latest, alive_ns),
        waited_for_all=bool(begun.joining),
        problems=folder.problems,
        manifest=folder.manifest,
    )


def _add_files(
    end: RankEvidence, folder: RankFolder, begun: _BegunFiles, left: _LeftFiles, position: RankPosition | None
) -> RankEvidence:
    """Add to how a rank ended what its files hold, but for what depends on the time at which they are read."""
    steps = left.records[left.records["kind"] == Kind.STEP]
    world_size, again = begun.run.get("world_size"), begun.rejoining
    _, rss_bytes, memory_limit_bytes = left.liveness
    return replace(
        end,
        host=str(begun.where.get("host", "")),
        pid=_int(begun.where.get("pid"), -1),
        is_launched=begun.where.get("is_launched") is True,
        position=position,
        steps_done=max(int(steps["step"][-1]) + 1 if len(steps) else 0, position.step if position else 0),
        step_time_ns=int(np.median(steps["end_ns"] - steps["start_ns"])) if len(steps) else None,
        rss_bytes=rss_bytes,
        memory_limit_bytes=memory_limit_bytes,
        unready=() if _has_lost_events(folder, begun, left) else _find_unready(left, end),
        models=read_models(folder.path, folder.problems),
        settings=read_rank_settings(folder.path, begun.run if begun.has_joined else begun.joining, folder.problems),
        replicas=read_replicas(folder.path, folder.problems),
        hyperparameters=read_hyperparameters(folder.path, folder.problems),
        unreduced=folder.read_dataclasses(UnreducedStep, UNREDUCED_FILE),
        interrupted_backwards=folder.read_dataclasses(InterruptedBackward, INTERRUPTED_BACKWARDS_FILE),
        caught=read_caught_errors(folder.path, folder.problems, rank=end.rank, pid=_int(begun.where.get("pid"), -1)),
        created_groups=folder.read_dataclasses(CreatedGroup, CREATED_GROUPS_FILE),
        non_finite=folder.read_dataclasses(NonFiniteGradients, NON_FINITE_FILE),
        loop=next(iter(folder.read_dataclasses(LoopFacts, LOOP_FACTS_FILE)), LoopFacts()),
        no_sync_since=None if left.off_since is not None else _no_sync_since(left.records),
        off_since=left.off_since,
        world_size=_int(again.get("world_size"), world_size) if isinstance(world_size, int) else None,
        init_calls=_int(again.get("call"), 1),
        machine=summarize_log(end.rank, read_machine_log(folder.path, folder.problems, latest_only=True)),
    )


@dataclass(frozen=True, kw_only=True)
class _BegunFiles:
    """What a rank wrote when it began."""

    joining: dict[str, Any]
    has_joined: bool
    """False while it waits for the other ranks in ``init_process_group``."""
    run: dict[str, Any]
    where: dict[str, Any]
    """``rank.json``; ``joining.json`` if it has not got further."""
    rejoining: dict[str, Any] = field(default_factory=dict)
    """Its latest call of ``init_process_group`` after the first one."""


def _read_begun(folder: RankFolder, *, has_launched: bool) -> _BegunFiles:
    joining = folder.joining()
    if joining and not has_launched and not folder.has(RANK_FILE):
        run = {"world_size": joining.get("world_size")}
        return _BegunFiles(joining=joining, has_joined=False, run=run, where=joining)
    again = folder.rejoining()
    named, where = folder.where(), read_process(folder.path)
    if named and named.get("rank") != where.get("rank"):
        folder.problems.append(make_foreign_file_problem(folder.path / RANK_FILE))
    return _BegunFiles(joining=joining, has_joined=True, run=folder.run(), where=where, rejoining=again)


@dataclass(frozen=True, kw_only=True)
class _LeftFiles:
    """What a rank's files hold about its latest steps."""

    unready: tuple[UnreadyParameter, ...]
    records: Records
    off_since: int | None
    """First step of those that were not recorded until the end, because recording was off."""
    reports: tuple[ReportedVerdict, ...]
    stall: StallSnapshot | None
    liveness: tuple[int | None, int | None, int | None]


def _read_left(folder: RankFolder) -> _LeftFiles:
    """Read in an order in which what is read later may only be newer, because the rank may continue meanwhile."""
    unready = read_unready_parameters(folder.path, folder.manifest, folder.problems)  # before its phase, in the records
    records = folder.latest_events()  # before the stall, which is over if something happened since
    return _LeftFiles(
        unready=unready,
        records=records,
        off_since=_read_off_since(folder),
        reports=_reported_verdicts(folder),
        stall=folder.stall_snapshot(),
        liveness=read_alive_file(folder.path / LIVENESS_FILE, folder.problems),
    )


def _read_off_since(folder: RankFolder) -> int | None:
    modes = folder.modes()
    return modes[-1].step if modes and modes[-1].every == OFF else None


def _reported_verdicts(folder: RankFolder) -> tuple[ReportedVerdict, ...]:
    """Read the verdicts of a rank's watchdog that were not retracted."""
    found = []
    for report in (each for each in folder.reports() if each.retracted_ns is None):
        try:
            found.append(from_dict(ReportedVerdict, {**report.verdict, "rank": report.rank, "time_ns": report.time_ns}))
        except (KeyError, TypeError, ValueError, AttributeError):
            text = f"{folder.path / REPORTS_FILE}: the verdict of report {report.number} is damaged; it is left out"
            folder.problems.append(Problem("error", text))
    return tuple(found)


def _find_position(
    begun: _BegunFiles,
    ended: dict[str, Any],
    left: _LeftFiles,
    latest: Entry | None,
    exits: Sequence[ProcessExit],
    *,
    seen: StallSnapshot | None,
    stacks: str,
) -> RankPosition | None:
    """Return the last known position of a rank, with all that its files show of it."""
    if not begun.has_joined:
        since_ns = _int(begun.joining.get("time_ns"), 0)
        return RankPosition(step=0, phase=JOINING, call_site=parse_call_site(begun.joining), since_ns=since_ns)
    if left.off_since is None:
        position = find_position(left.records, latest, find_job_signal_ns(begun.where, exits))
        position = position if len(left.records) else _add_last_step(position, ended)
    else:
        position = _find_position_while_off(left, latest)
    if position is None and seen is not None:  # it has launched nothing, and stands somewhere before its first step
        position = RankPosition(step=0, since_ns=parse_written_ns(begun.where) or 0)
    if position is None:
        return None
    if ended.get("unrecorded_because") is not None:
        return RankPosition(step=position.step)
    is_current = seen is not None or not left.reports
    position = add_call_site(position, stacks, left.reports, is_current=is_current)
    end_record = parse_failure(ended) or parse_exit_call(ended) or seen
    if end_record is not None:
        return replace(position, has_begun_next_iteration=end_record.has_begun_next_iteration)
    of_backward = latest.call_site if latest is not None and latest.signature.bucket != NO_BUCKET else None
    return replace(position, has_begun_next_iteration=has_begun_next_iteration(stacks, of_backward))


def _add_last_step(position: RankPosition | None, ended: dict[str, Any]) -> RankPosition | None:
    """Return the position with the step in which the rank ended: its collectives may only show the one before."""
    step = _int(ended.get("step"), 0)
    if position is None or step <= position.step:
        return position
    return replace(position, step=step, is_after_update=ended.get("is_after_update") is True)


def _add_rejoining(position: RankPosition | None, rejoining: dict[str, Any]) -> RankPosition | None:
    """Return the position of a rank that waits in a later ``init_process_group``, or has failed there."""
    if not rejoining or rejoining.get("has_joined") is not False:
        return position
    return RankPosition(
        step=0 if position is None else position.step,
        phase=JOINING,
        call_site=parse_call_site(rejoining),
        since_ns=_int(rejoining.get("time_ns"), 0),
    )


def _find_position_while_off(left: _LeftFiles, latest: Entry | None) -> RankPosition | None:
    """Return the position of the latest collective: no phases are recorded while recording is off."""
    if latest is None or left.off_since is None or latest.step < left.off_since:
        return None if left.off_since is None else RankPosition(step=left.off_since)
    position = find_position(left.records[:0], latest)
    is_over = latest.state == "completed"  # and the rank went on from there
    return replace(position, phase=None, call_site=None) if position is not None and is_over else position


def _find_own_exit(ended: dict[str, Any], where: dict[str, Any], exits: Sequence[ProcessExit]) -> ProcessExit | None:
    """Return the exit of a rank's process; None for one that had detached, as its recording was over before."""
    return None if ended.get("is_detached") is True else find_exit(where, exits)


def _find_end(
    rank: int, ended: dict[str, Any], own_exit: ProcessExit | None, *, has_report: bool, alive_ns: int | None
) -> RankEvidence:
    """Return how a process ended, according to its own record and its parent's; nothing is set while it runs."""
    call, ended_ns = parse_exit_call(ended), parse_written_ns(ended)
    own_status = None if call is None else call.status
    status, signaled_at_ns, signal = _observed_exit(own_exit, own_status, ended_ns)
    is_ended_by_watchdog = has_report and status == WATCHDOG_ABORT_STATUS
    # A process of torch.multiprocessing.spawn is sent SIGINT when its parent ends, and ignores it.
    if signaled_at_ns is None and (is_ended_by_watchdog or ended.get("has_lost_parent") is True):
        signaled_at_ns = ended_ns or alive_ns or 0
    why = ended.get("unrecorded_because")
    return RankEvidence(
        rank=rank,
        exit_status=status,
        exit_call=call,
        failure=parse_failure(ended),
        ended_ns=ended_ns,
        signaled_at_ns=signaled_at_ns,
        signal_received=None if signaled_at_ns is None else signal,
        unrecorded_because=None if why is None else str(why),
    )


def _observed_exit(
    own_exit: ProcessExit | None, own_status: int | None, ended_ns: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return the exit status, when the process was signaled, and the signal, as its parent observed them."""
    if own_exit is None:
        return own_status, None, None
    status, signaled_at_ns = own_exit.status, own_exit.signaled_at_ns
    if signaled_at_ns is not None and ended_ns is not None and ended_ns < signaled_at_ns:  # it was about to exit
        return own_status if status < 0 else status, None, own_exit.signal_received
    return status, signaled_at_ns, own_exit.signal_received


def _recorded_liveness(ended: dict[str, Any], where: dict[str, Any]) -> Liveness:
    how = ended.get("how")
    if ended and how != "unrecorded":
        return "failed" if how == "exception" else "ended"
    return read_liveness(where) if is_on_this_host(where) else "unknown"


def _combine(liveness: Liveness, end: RankEvidence) -> Liveness:
    """Combine the state of a process with its exit status and signal."""
    liveness = combine_liveness_and_status(liveness, end.exit_status)
    # A signal handler, or spawn, may turn the signal into a normal exit.
    return "gone" if end.signaled_at_ns is not None and liveness == "ended" else liveness


def _current_stall(left: _LeftFiles, latest: Entry | None) -> StallSnapshot | None:
    """Return the last stall snapshot of the watchdog, if there was no activity afterwards."""
    seen = left.stall
    return seen if seen is not None and seen.time_ns >= _latest_ns(left.records, latest) else None


def _alive_ns(left: _LeftFiles) -> int | None:
    """Return when the watchdog was last awake: also when it wrote a report."""
    alive_ns = left.liveness[0]
    return None if alive_ns is None else max([alive_ns, *(report.time_ns for report in left.reports)])


def _find_unready(left: _LeftFiles, end: RankEvidence) -> tuple[UnreadyParameter, ...]:
    """Return the parameters without a gradient, without those that the gradient-ready file must be wrong about."""
    if end.unrecorded_because is not None:  # the file is from a step long ago
        return ()
    return tuple(parameter for parameter in left.unready if not _was_launched(parameter, left.records))


def _has_lost_events(folder: RankFolder, begun: _BegunFiles, left: _LeftFiles) -> bool:
    """Return True if a rank has trained and its event log is gone: whether a backward was over is unknown."""
    return bool(begun.run.get("models")) and not len(left.records) and not folder.has(EVENTS_FILE)


def _report_missing_log(folder: RankFolder, begun: _BegunFiles, left: _LeftFiles, end: RankEvidence) -> None:
    if end.unrecorded_because or not _has_lost_events(folder, begun, left):
        return
    text = f"{folder.path / EVENTS_FILE}: missing; this rank trained with a model"
    folder.problems.append(Problem("error", text))


def _report_missing_signatures(folder: RankFolder, *, has_launched: bool) -> None:
    if has_launched and not folder.has(SIGNATURES_FILE):
        text = f"{folder.path / SIGNATURES_FILE}: missing; what this rank launched is unknown"
        folder.problems.append(Problem("error", text))


def _has_lost_logs(folder: RankFolder, begun: _BegunFiles, ended: dict[str, Any]) -> bool:
    """Return True if a rank has launched collectives and their logs are gone: whether it closed them is unknown."""
    return begun.has_joined and not ended and folder.has(SIGNATURES_FILE) and not has_collective_logs(folder.path)


def _lifetime(
    begun: _BegunFiles, evidence: RankEvidence, left: _LeftFiles, latest: Entry | None, alive_ns: int | None
) -> Lifetime | None:
    begun_ns, boot = parse_written_ns(begun.where), begun.where.get("boot_id")
    latest_ns = _latest_ns(left.records, latest)
    if begun_ns is None or not boot:
        return Lifetime(boot=None, begun_ns=latest_ns, last_ns=latest_ns) if latest_ns else None
    last_ns = [begun_ns, evidence.ended_ns or 0, alive_ns or 0, latest_ns]
    if evidence.liveness in LIVE_STATES:
        last_ns.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    return Lifetime(boot=str(boot), begun_ns=begun_ns, last_ns=max(last_ns))


def _add_idle_time(
    evidence: RankEvidence, begun: _BegunFiles, records: Records, latest: Entry | None, alive_ns: int | None
) -> RankEvidence:
    """Add how long there has been no activity, until now or until the rank was last heard from."""
    begun_ns = parse_written_ns(begun.where)  # the last that is known of a rank that has launched nothing
    if evidence.liveness in LIVE_STATES:
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        is_starting = evidence.steps_done < ENOUGH_STEPS and (latest is None or bool(begun.run.get("models")))
        idle_ns = compute_idle_ns(records, latest, now_ns, begun_ns)
        if evidence.position is not None and evidence.position.phase == JOINING:
            idle_ns = now_ns - evidence.position.since_ns
        return replace(evidence, idle_ns=idle_ns, is_starting=is_starting)
    if evidence.liveness in ("gone", "unknown") and alive_ns is not None:
        return replace(evidence, idle_ns=compute_idle_ns(records, latest, alive_ns, begun_ns))
    if evidence.failure is not None and is_interrupted(evidence.failure):
        return replace(evidence, idle_ns=compute_idle_ns(records, latest, evidence.failure.time_ns))
    return evidence


def _was_launched(parameter: UnreadyParameter, records: Records) -> bool:
    """Return True if the latest backward launched a parameter's bucket."""
    entered = records["sequence"][(records["kind"] == Kind.PHASE_BEGIN) & (records["index"] == Phase.BACKWARD)]
    if not len(entered):
        return False
    is_launch = (records["kind"] == Kind.LAUNCH) & (records["sequence"] > entered[-1])
    is_it = (records["model"] == parameter.model) & (records["index"] == parameter.bucket)
    return bool((is_launch & is_it).any())


def _no_sync_since(records: Records) -> int | None:
    """Return the value of ``RankEvidence.no_sync_since``."""
    over = records["step"][records["kind"] == Kind.STEP]
    passes = records[(records["kind"] == Kind.PHASE) & (records["index"] == Phase.BACKWARD)]
    passes = passes[np.isin(passes["step"], over)]
    reduced = passes["step"][(passes["flags"] & Flag.NO_SYNC) == 0]
    later = passes["step"][passes["step"] > reduced.max()] if len(reduced) else passes["step"]
    return int(later.min()) if len(later) else None


def _int(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
