"""Monitor of this rank: its heartbeat for neighbors, and its full snapshot when ranks investigate.

The monitor also samples whether a rank that makes no progress is busy (CPU, I/O, Python code), which tells working from
waiting, and looks at process groups under construction, which have no log yet.
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from instrumented_ddp.collectives.call_sites import describe_frame, find_user_frame, iter_frames
from instrumented_ddp.collectives.created_groups import MAKES_GROUP, count_created_groups
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.recording.caught_errors import CaughtErrors
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.replicas.replicas import ReplicaComparison
from instrumented_ddp.watchdog.init_watch import get_latest_init_call
from instrumented_ddp.watchdog.peer_comparison import list_digest, log_head
from instrumented_ddp.watchdog.process_state import (
    ProcessState,
    bytes_read_and_written,
    cpu_ns_of_children,
    memory_limit_bytes,
    queued_ns,
    read_process_state,
)
from instrumented_ddp.watchdog.progress import ProgressTracker
from instrumented_ddp.watchdog.protocol import EntriesRequest, Heartbeat
from overlapscope.diagnosis.caught_errors import read_caught_errors
from overlapscope.diagnosis.collective_order import phase_name
from overlapscope.diagnosis.evidence import (
    JOINING,
    CallSite,
    CaughtError,
    ExitCall,
    Failure,
    RankEvidence,
    RankPosition,
)
from overlapscope.diagnosis.process_state import find_user_line
from overlapscope.diagnosis.rank_models import read_models, read_replicas_for_snapshot, read_unready_parameters
from overlapscope.diagnosis.rank_settings import read_rank_settings
from overlapscope.diagnosis.rank_snapshot import RankSnapshot, make_snapshot
from overlapscope.diagnosis.replica_drift import read_hyperparameters
from overlapscope.diagnosis.stall_timeout import BUSY_CPU_SHARE
from overlapscope.diagnosis.text import format_position
from overlapscope.machine.evidence import summarize_log
from overlapscope.trace import clocks
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.collective_log import FAILED, CollectiveLogWriter
from overlapscope.trace.json_files import read_json
from overlapscope.trace.machine_log import read_machine_log
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.process_files import StallSnapshot, write_stall_snapshot
from overlapscope.trace.schema import RUN_FILE, Phase

_IN_FLIGHT: Final = 16
"""Upper bound of the number of collectives of a group that are in flight at the same time."""
_SNAPSHOT_INTERVAL_S: Final = 1.0
_FRAMES: Final = 12
_WINDOW_NS: Final = 1_500_000_000
_MIN_CODE_POSITIONS: Final = 3
"""Number of distinct Python code positions, sampled within about a second, that tell work from a polling loop."""
_MIN_IO_BYTES: Final = 1024**2
_MAX_CAUGHT: Final = 6
"""Maximum number of exceptions in a snapshot."""


class UserCodeWatch:
    """Tells whether a stalled main thread has left the user's code, as if it was interrupted and destructors run."""

    def __init__(self) -> None:
        self._last_seen_s = -math.inf

    def has_left(self, stacks: str, now_s: float, idle_s: float) -> bool:
        """Return True if the main thread was in the user's code in this stall, which has lasted so long, and is not."""
        if find_user_line(stacks) is not None:
            self._last_seen_s = now_s
        return self._last_seen_s != now_s and now_s - self._last_seen_s < idle_s


class LocalRankMonitor:
    """Observer of the state and progress of this process.

    Args:
        collectives: collective log of this process.
        models: DDP instances of this process.
        replicas: fingerprints of the models.
        caught: exceptions that have not ended this process.
    """

    def __init__(
        self,
        collectives: CollectiveRecorder,
        models: ModelRegistry,
        replicas: ReplicaComparison,
        caught: CaughtErrors,
    ) -> None:
        self.rank = collectives.rank
        self.pid = os.getpid()
        self.process: ProcessState = read_process_state(self.pid)
        self.progress_tracker = ProgressTracker()
        self.failure: Failure | None = None
        self.has_ended = False
        """True once the process ends and its watchdog with it."""
        self.exit_call: ExitCall | None = None
        """Last call of ``sys.exit``, set while the process exits."""
        self.unrecorded_because: str | None = None
        """Reason why the recording ended before the process; None if it did not."""
        self._collectives = collectives
        self._models = models
        self._replicas = replicas
        self._caught = caught
        self._position = collectives.position
        self._host = socket.gethostname()
        self.host_id = clocks.get_host_id()
        self.dumps_stacks = False
        """True if faulthandler dumps stacks on a signal in this process."""
        self._limit_bytes = memory_limit_bytes()
        self._world_size = 1
        self._activity = Activity(self.pid)
        self._snapshot_written_s = 0.0
        self._user_code = UserCodeWatch()

    # -- periodic observation ------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Observe the progress of this process.

        Returns:
            True if anything has happened since the last observation.
        """
        has_ended = [int(entry["completed_ns"] > 0) for entry in self._latest_entries()]
        mark = (
            self._position.step,
            self._position.phase,
            self._position.since_ns,
            *(log.latest for log in self._logs),
            *has_ended,
        )
        self.process = read_process_state(self.pid, self.process.start_ticks)
        return self.progress_tracker.observe(time.monotonic(), self.step if self._has_steps else None, mark)

    def sample_activity(self) -> None:
        """Sample the activity of this process during a stall, and write it to a file about once a second."""
        self._activity.sample(frames_of_main_thread())
        self._caught.note_being_handled()
        now_s = time.monotonic()
        if self.progress_tracker.idle_s(now_s) >= _SNAPSHOT_INTERVAL_S <= now_s - self._snapshot_written_s:
            self._snapshot_written_s = now_s
            snapshot, idle_s = self._stall_snapshot(), self.progress_tracker.idle_s(now_s)
            if not self._user_code.has_left(snapshot.stacks, now_s, idle_s):
                with suppress(OSError):
                    write_stall_snapshot(self._collectives.folder, snapshot)

    def _stall_snapshot(self) -> StallSnapshot:
        is_working = self._activity.is_working()
        return StallSnapshot(
            time_ns=host_now_ns(),
            longest_recovered_stall_ns=round(self.progress_tracker.longest_pause_s * 1e9),
            cpu_share=self._activity.cpu_share(),
            is_working=is_working if is_working is None else is_working or self.process.state == "D",
            has_begun_next_iteration=self._has_begun_next(),
            stacks=stacks(),
        )

    @property
    def memory(self) -> tuple[int, int]:
        """Return the resident memory and the memory limit, in bytes."""
        return self.process.resident_bytes, self._limit_bytes

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        with suppress(ValueError):  # the training thread may be destroying its process group
            self._world_size = dist.get_world_size()
        return self._world_size

    @property
    def step(self) -> int:
        """Return the optimizer step in progress."""
        return self._position.step

    @property
    def progress(self) -> int:
        """Return a count of steps, else of collectives, that grows with training and not when a collective fails."""
        if self._has_steps:
            return self.step
        return (self._collectives.entries_of_destroyed_groups + sum(log.latest for log in self._logs)) // 2

    def in_collective_s(self) -> float | None:
        """Return how long this rank has been in a collective that has not ended; None if it is in none.

        That need not be the latest one: gloo runs two at a time, and the second may end first.
        """
        entries = (entry for log in self._logs for entry in log.read(max(1, log.latest - _IN_FLIGHT + 1), log.latest))
        begun_ns = [int(e["announced_ns"]) for e in entries if not e["completed_ns"] and e["announced_ns"]]
        return (host_now_ns() - min(begun_ns)) / 1e9 if begun_ns else None

    def has_completed(self, group: str, number: int) -> bool:
        """Return whether a collective of a group has completed here, without an error."""
        logs = [log for log in self._logs if log.header.name == group and not log.header.point_to_point]
        entries = [entry for log in logs for entry in log.read(number, number) if int(entry["number"]) == number]
        return any(int(e["completed_ns"]) and not int(e["flags"]) & FAILED for e in entries)

    def heartbeat(self, requests: Mapping[int, EntriesRequest] | None = None) -> Heartbeat:
        """Return the current heartbeat.

        Args:
            requests: requests to neighbors, by rank.
        """
        heads = {
            log.header.name: head
            for log in self._logs
            if not log.header.point_to_point and (head := log_head(log, self._collectives.signatures)) is not None
        }
        evidence = self._brief_evidence()
        has_ended = self.has_ended and self.failure is None
        return Heartbeat(
            evidence=replace(evidence, liveness="ended") if has_ended else evidence,
            host_id=self.host_id,
            start_ticks=self.process.start_ticks,
            time_ns=host_now_ns(),
            dumps_stacks=self.dumps_stacks,
            heads=heads,
            requests=dict(requests or {}),
            replicas=self._replicas.latest(),
            created_groups={one.name: list_digest(one.ranks) for one in self._collectives.created_groups.latest},
        )

    def _brief_evidence(self) -> RankEvidence:
        """Return the evidence that costs next to nothing."""
        step_s = self.progress_tracker.step_s
        return RankEvidence(
            rank=self.rank,
            host=self._host,
            pid=self.pid,
            liveness="failed" if self.failure is not None else "running" if self.process.state == "R" else "sleeping",
            unrecorded_because=self.unrecorded_because,
            failure=self.failure,
            exit_call=self.exit_call,
            position=self._brief_position(),
            steps_done=self.step,
            step_time_ns=None if step_s is None else round(step_s * 1e9),
            rss_bytes=self.memory[0],
            memory_limit_bytes=self.memory[1] or None,
        )

    def _brief_position(self) -> RankPosition:
        has_partly_updated = self._position.has_partly_updated
        return RankPosition(
            step=self.step + has_partly_updated,
            phase=phase_name(self._position.phase),
            since_ns=self._position.since_ns,
            is_after_update=self._position.has_updated or has_partly_updated,
        )

    def position_text(self) -> str:
        """Return the current position as text for people."""
        return format_position(self._rank_position())

    # -- full snapshot -------------------------------------------------------------------------------------------

    def snapshot(
        self,
        differences: Mapping[str, int],
        *,
        with_models: bool,
        with_replicas: bool = False,
        listening: Iterable[str],
    ) -> RankSnapshot:
        """Return the full snapshot of this rank.

        Args:
            differences: by group, the entry number around which collectives are wanted; of other groups the latest are.
            with_models: whether to include the parameters of all models, which are long.
            with_replicas: whether to include their fingerprints and the optimizer settings, which are long.
            listening: endpoints at which this process accepts connections.
        """
        known = self._collectives.signatures
        snapshot = make_snapshot(
            self.evidence(with_models=with_models, with_replicas=with_replicas),
            self._logs,
            signature_of=lambda number: known[number - 1] if 0 < number <= len(known) else None,
            call_site_of=self._site,
            differences=differences,
            listening=listening,
        )
        # Since the last look, which may be several messages ago, this rank may have launched what is in the snapshot.
        events_ns = (int(entry[name]) for entry in self._latest_entries() for name in ("announced_ns", "completed_ns"))
        idle_ns = min(snapshot.evidence.idle_ns or 0, host_now_ns() - max(events_ns, default=0))
        return replace(snapshot, evidence=replace(snapshot.evidence, idle_ns=idle_ns))

    def evidence(self, *, with_models: bool, with_replicas: bool = False) -> RankEvidence:
        """Return the evidence that the diagnosis rules need about this rank."""
        seen, folder = self._stall_snapshot(), self._collectives.folder
        self._models.note_frozen()
        return replace(
            self._brief_evidence(),
            position=self._rank_position(),
            is_starting=self.progress_tracker.is_starting,
            longest_recovered_stall_ns=seen.longest_recovered_stall_ns,
            idle_ns=round(self.progress_tracker.idle_s(time.monotonic()) * 1e9),
            silent_for_ns=0,
            cpu_share=seen.cpu_share,
            is_working=seen.is_working,
            unready=()
            if self.unrecorded_because is not None
            else read_unready_parameters(folder, Manifest(folder, []), []),
            models=read_models(folder, []) if with_models else (),
            settings=read_rank_settings(folder, read_json(folder / RUN_FILE, []), []),
            replicas=read_replicas_for_snapshot(folder) if with_replicas else (),
            hyperparameters=read_hyperparameters(folder, []) if with_replicas else (),
            unreduced=self._models.unreduced,
            interrupted_backwards=self._models.interrupted_backwards,
            non_finite=self._models.non_finite,
            no_sync_since=self._position.no_sync_since,
            caught=self._list_caught(),
            new_group_calls=count_created_groups(),
            created_groups=self._collectives.created_groups.latest,
            creating_group=ranks_of_group_in_creation(frames_of_main_thread()),
            world_size=self.world_size if (call := get_latest_init_call()) is None else call.world_size,
            init_calls=1 if call is None else call.number,
            machine=summarize_log(self.rank, read_machine_log(folder, [], latest_only=True)),
            stacks=seen.stacks,
        )

    def _list_caught(self) -> tuple[CaughtError, ...]:
        """Return the exceptions that did not end this process, or have ended its children: the latest few."""
        of_children = [
            one for one in read_caught_errors(self._collectives.folder, [], rank=self.rank, pid=self.pid) if one.process
        ]
        return tuple(sorted((*of_children, *self._caught.latest), key=lambda one: one.last_ns)[-_MAX_CAUGHT:])

    def _rank_position(self) -> RankPosition:
        if self.unrecorded_because is not None:
            return RankPosition(step=self.step, call_site=self._call_site())
        brief = self._brief_position()
        if (call := get_latest_init_call()) is not None and not call.has_joined and self.failure is None:
            return replace(brief, phase=JOINING, call_site=call.call_site, since_ns=call.since_ns)
        return replace(
            brief,
            bucket=self._next_bucket() if brief.phase == "backward" else None,
            call_site=self._call_site(),
            has_begun_next_iteration=self._has_begun_next()
            if self.failure is None
            else self.failure.has_begun_next_iteration,
        )

    def _has_begun_next(self) -> bool | None:
        return self._collectives.loop.has_begun_next_iteration(iter_frames(innermost_frame()))

    def _call_site(self) -> CallSite | None:
        """Return the user's source line that runs, or has failed."""
        if self.failure is not None:
            return self.failure.call_site
        frame = find_user_frame(innermost_frame())
        return None if frame is None else CallSite(**describe_frame(frame))

    def _next_bucket(self) -> int | None:
        """Return the bucket after this step's latest; None where sums end after the backward, in another order."""
        step, known, following = self.step, self._collectives.signatures, 0
        for entry in self._latest_entries():
            number = int(entry["signature"])
            if 0 < number <= len(known) and known[number - 1].role == "bucket" and int(entry["step"]) == step:
                if known[number - 1].op != "all_reduce" or int(entry["phase"]) == Phase.FINALIZE:
                    return None
                following = following or known[number - 1].bucket + 1
        return following

    # -- helpers -------------------------------------------------------------------------------------------------

    @property
    def _logs(self) -> list[CollectiveLogWriter]:
        return list(self._collectives.logs)

    @property
    def _has_steps(self) -> bool:
        return self._position.has_phases or self.step > 0

    def _latest_entries(self) -> list[Any]:
        """Return the latest entry of each group."""
        return [entry for log in self._logs for entry in log.read(log.latest, log.latest)]

    def _site(self, number: int) -> CallSite | None:
        location = self._collectives.call_sites.location(number)
        return None if location is None else CallSite(file=location[0], line=location[1], function=location[2])


@dataclass(frozen=True)
class _Sample:
    time_ns: int
    cpu_ns: int
    queued_ns: int
    data_bytes: int
    code_position: tuple[int, ...]


class Activity:
    """Recent activity of a process, over a sliding window of about 1.5 seconds.

    Args:
        pid: process ID of the observed process, which is this one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: deque[_Sample] = deque(maxlen=32)

    def sample(self, frames: Sequence[FrameType]) -> None:
        """Record one sample of CPU time, run-queue time, I/O and code position.

        Args:
            frames: stack frames of the main thread, innermost first.
        """
        # Of what this thread uses itself nothing counts: it observes most while the training does nothing.
        cpu_ns = time.process_time_ns() - time.thread_time_ns() + cpu_ns_of_children(self._pid)
        code_position = tuple(part for frame in frames[:_FRAMES] for part in (id(frame.f_code), frame.f_lasti))
        data_bytes = bytes_read_and_written(self._pid)
        self._samples.append(_Sample(host_now_ns(), cpu_ns, queued_ns(self._pid), data_bytes, code_position))

    def cpu_share(self) -> float | None:
        """Return the CPU time used as a share of one core; None with fewer than two samples."""
        recent = self._recent()
        if len(recent) < 2 or recent[-1].time_ns == recent[0].time_ns:
            return None
        used_ns = max(0, recent[-1].cpu_ns - recent[0].cpu_ns)  # the CPU time of children vanishes when they exit
        return used_ns / (recent[-1].time_ns - recent[0].time_ns)

    def is_working(self) -> bool | None:
        """Return whether the process executes Python code, does I/O or queues for a core; None without samples."""
        recent = self._recent()
        if not recent:
            return None
        has_moved = len({sample.code_position for sample in recent}) >= _MIN_CODE_POSITIONS
        moves_data = recent[-1].data_bytes - recent[0].data_bytes >= _MIN_IO_BYTES
        return has_moved or moves_data or self._is_runnable(recent)

    def _is_runnable(self, recent: Sequence[_Sample]) -> bool:
        """Return whether the process computes or queues for a core: on a crowded host it gets little of one.

        A process that waits does not even queue.
        """
        first, last = recent[0], recent[-1]
        queued_share = (last.queued_ns - first.queued_ns) / max(1, last.time_ns - first.time_ns)
        return queued_share + (self.cpu_share() or 0.0) >= BUSY_CPU_SHARE

    def _recent(self) -> list[_Sample]:
        return [one for one in self._samples if self._samples[-1].time_ns - one.time_ns <= _WINDOW_NS]


def ranks_of_group_in_creation(frames: Iterable[FrameType]) -> tuple[int, ...]:
    """Return the ranks of the group that a thread is creating; empty if it creates none, or its ranks are unknown.

    Args:
        frames: stack frames of the thread.
    """
    for frame in frames:
        if frame.f_code.co_name != MAKES_GROUP or frame.f_globals.get("__name__") != distributed_c10d.__name__:
            continue
        ranks = frame.f_locals.get("ranks")
        if frame.f_locals.get("use_local_synchronization") or not isinstance(ranks, list):
            return ()  # such groups are not counted
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()


def innermost_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frames_of_main_thread() -> list[FrameType]:
    """Return all frames of the main thread, innermost first."""
    frame, frames = innermost_frame(), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def stacks() -> str:
    """Return the stack traces of all threads, as faulthandler formats them."""
    with suppress(OSError, RuntimeError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""
