"""The watchdog of a rank: compares its collectives with its neighbors', and notices stalls, while it trains.

It runs about every 0.7 s on the background thread: it observes the rank, exchanges messages with the other ranks, and
carries out the actions that the protocol asks for. The protocol itself is ``protocol.py``, without any I/O: it knows
three states (idle, investigating, stopping), and decides what to write, to report and when to stop the job;
``docs/diagnosis.md`` shows it as a diagram. The watchdog holds no lock that the training waits for beyond a read of a
few log entries, and never uses a device. Its findings are judged by the rules of ``overlapscope.diagnosis``, which also
judge finished jobs.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.recording.background import BackgroundScheduler
from instrumented_ddp.recording.caught_errors import CaughtErrors
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.replicas.replicas import ReplicaComparison
from instrumented_ddp.watchdog import protocol
from instrumented_ddp.watchdog.abort import abort_pending_collectives, listening_endpoints, raise_in_training
from instrumented_ddp.watchdog.investigation import Inspector, liveness_of, process_of
from instrumented_ddp.watchdog.local_rank import LocalRankMonitor
from instrumented_ddp.watchdog.peer_channel import PeerChannel
from instrumented_ddp.watchdog.peer_comparison import (
    CreatedGroupCheck,
    NeighborComparison,
    ReplicaCheck,
    neighbors_by_group,
)
from instrumented_ddp.watchdog.process_state import FaulthandlerDump
from instrumented_ddp.watchdog.protocol import (
    Abort,
    Action,
    Alarm,
    Heartbeat,
    Judge,
    LogMayContinue,
    LogSlow,
    LogUnreachable,
    Messages,
    Observation,
    Outcome,
    Participant,
    Publish,
    ReportFault,
    RetractReport,
    State,
    heartbeat_key,
    identify_fault,
)
from overlapscope.diagnosis.evidence import ExitCall, Failure
from overlapscope.trace.collective_log import CollectiveLogWriter
from overlapscope.trace.json_files import from_json, to_json
from overlapscope.trace.live_files import LivenessFile
from overlapscope.trace.process_files import WATCHDOG_ABORT_STATUS, ReportLog

_log: Final = logging.getLogger(__name__)

_USUAL_INTERVAL_S: Final = 0.8
_FIRST_INTERVAL_S: Final = 0.1
_LEARNS_FOR_S: Final = 5.0
_INTERVAL_WHEN_IDLE_S: Final = 0.25
_INVESTIGATION_INTERVAL_S: Final = 0.08
_STOP_INTERVAL_S: Final = 0.04
_IDLE_AFTER_S: Final = 0.8
_MAX_ROUNDS: Final = 3
"""Maximum number of exchanges per run: one is enough unless there are requests or alarms."""
_ACTIVITY_SAMPLING_S: Final = 2.0
"""Time in seconds before the stall limit at which the activity of this process begins to be sampled."""
_FAILURE_REPORT_TIMEOUT_S: Final = 2.5
"""Time in seconds that a failing process waits for the outcome."""
_PROPAGATION_S: Final = 0.15
"""Time in seconds within which all ranks have read that the job is stopped."""
_NON_FINITE_AFTER_NS: Final = 1_000_000_000
"""Time after which weights that are not finite are reported: by then all ranks have seen what their gradients were."""
_INTENTIONAL_EXITS: Final = ("KeyboardInterrupt", "SystemExit", "IncidentError")
"""Exceptions by which a job is ended on purpose."""


class Watchdog:
    """The watchdog of this process; a ``PeriodicTask``.

    Args:
        collectives: collective log of this process.
        models: DDP instances of this process.
        replicas: fingerprints of the models.
        caught: exceptions that have not ended this process.
        scheduler: scheduler that runs the watchdog.
        abort_after_s: minimum stall in seconds before a possibly slow job is stopped on all ranks; faults that are
            certain stop it at once. None to never stop it.
        on_fault: called when a fault was found.
        before_exit: called before this process is ended.
    """

    name = "the watchdog"

    def __init__(
        self,
        collectives: CollectiveRecorder,
        models: ModelRegistry,
        replicas: ReplicaComparison,
        caught: CaughtErrors,
        scheduler: BackgroundScheduler,
        *,
        abort_after_s: float | None,
        on_fault: Callable[[], None],
        before_exit: Callable[[], None],
    ) -> None:
        self._collectives = collectives
        self._models = models
        self._on_fault = on_fault
        self._before_exit = before_exit
        self._local = LocalRankMonitor(collectives, models, replicas, caught)
        self._replica_check = ReplicaCheck(replicas)
        self._created_group_check = CreatedGroupCheck()
        self._neighbors = NeighborComparison(collectives.rank, collectives.signatures)
        self._reports = ReportLog(collectives.folder)
        self._report_numbers: dict[tuple[Any, ...], int] = {}
        self._channel = PeerChannel(
            collectives.folder.parent, collectives.rank, lambda: self._local.world_size, self._final_messages
        )
        self._me = Participant(rank=collectives.rank, world_size=1, stall_timeout_s=abort_after_s)
        self._inspector: Inspector | None = None
        self._heartbeats: dict[int, Heartbeat] = {}
        self._is_failure_known = threading.Event()
        self._faulthandler_dump: FaulthandlerDump | None = None
        with suppress(OSError, RuntimeError, ValueError):
            self._faulthandler_dump = FaulthandlerDump(collectives.folder)
            self._local.dumps_stacks = True
        self._began_s = time.monotonic()
        self._liveness_file = LivenessFile(collectives.folder)
        self._scheduler = scheduler
        scheduler.add(self)

    # -- called on the training thread ---------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        """Report an exception that ends this process, and wait briefly for the outcome of all ranks."""
        if (
            os.getpid() != self._local.pid
            or not self._scheduler.is_scheduled(self)
            or failure.type in _INTENTIONAL_EXITS
        ):
            return
        self._local.failure = failure
        self._scheduler.wake(self)
        self._is_failure_known.wait(_FAILURE_REPORT_TIMEOUT_S)

    def note_recording_end(self, why: str) -> None:
        """Note that recording has ended, and why. The rank still communicates, but its position is unknown."""
        self._local.unrecorded_because = why

    def exits(self, call: ExitCall | None) -> None:
        """Note that the process exits, perhaps by a call of ``sys.exit``."""
        self._local.exit_call = call

    def close(self) -> None:
        """Unregister faulthandler. May be called twice."""
        if self._faulthandler_dump is not None:
            self._faulthandler_dump.close()
            self._faulthandler_dump = None

    # -- called on the background thread -------------------------------------------------------------------------

    def run(self) -> float:
        """Observe this rank, communicate, and investigate after an alarm.

        Returns:
            The time until the next run, in seconds.
        """
        try:
            self._liveness_file.write(*self._local.memory)
            self._look()
        except Exception:
            self._is_failure_known.set()
            raise
        return self._interval_s(time.monotonic() - self._began_s)

    def end(self) -> None:
        """Take back what the rest of the job has refuted, publish the final heartbeat, and stop."""
        with suppress(Exception):  # the others still have to hear that this process was not killed
            self._follow(protocol.observe(self._me, self._observation(has_advanced=self._local.look())))
        self._publish_exit()
        self._liveness_file.close()

    def _interval_s(self, age_s: float) -> float:
        if self._me.state is State.STOPPING:
            return _STOP_INTERVAL_S
        if self._me.state is State.INVESTIGATING or self._me.pending_alarm is not None or self._neighbors.reply_keys():
            return _INVESTIGATION_INTERVAL_S
        if self._local.progress_tracker.idle_s(time.monotonic()) > _IDLE_AFTER_S:
            interval_s = _INTERVAL_WHEN_IDLE_S
        else:
            share = min(1.0, age_s / _LEARNS_FOR_S)
            interval_s = _FIRST_INTERVAL_S + (_USUAL_INTERVAL_S - _FIRST_INTERVAL_S) * share
        return interval_s * random.uniform(0.8, 1.0)  # ranks start together, and must not poll all at the same time

    def _look(self) -> None:
        has_advanced = self._local.look()
        idle_s = self._local.progress_tracker.idle_s(time.monotonic())
        if self._me.state is State.INVESTIGATING or idle_s > max(
            _IDLE_AFTER_S, self._local.progress_tracker.notice_limit_s - _ACTIVITY_SAMPLING_S
        ):
            self._local.sample_activity()
        seen = self._observation(has_advanced=has_advanced)
        self._follow(protocol.observe(self._me, seen))
        for _ in range(_MAX_ROUNDS):
            if not self._run_round(seen):
                break
        if self._me.state is not State.IDLE:
            self._follow(protocol.advance(self._me, time.monotonic(), self._unresponsive_ranks()))

    def _observation(self, *, has_advanced: bool = False) -> Observation:
        local = self._local
        in_collective_s, since_ns = local.in_collective_s(), self._models.non_finite_since_ns
        return Observation(
            now_s=time.monotonic(),
            tracker=local.progress_tracker,
            progress=local.progress,
            has_advanced=has_advanced,
            in_collective_s=in_collective_s,
            is_failing=local.failure is not None,
            has_unreduced_gradients=self._models.has_unreduced_gradients,
            has_non_finite_weights=since_ns is not None and time.monotonic_ns() - since_ns > _NON_FINITE_AFTER_NS,
            is_neighbor_gone=in_collective_s is not None
            and any(
                heartbeat.host_id == local.host_id and liveness_of(heartbeat, process_of(heartbeat), None) == "gone"
                for heartbeat in self._heartbeats.values()
            ),
            has_got_past=local.has_completed(*waits_in) if (waits_in := self._me.reported.waits_in) else False,
        )

    def _unresponsive_ranks(self) -> set[int]:
        case = self._me.investigation
        if self._inspector is None or case is None or not case.is_judge:
            return set()
        missing = protocol.missing_ranks(self._me)
        return self._inspector.unresponsive_ranks({r: h for r, h in case.heartbeats.items() if r in missing})

    def _follow(self, step: protocol.Step) -> None:
        """Take over the next state, and carry out the actions that lead to it."""
        before, (self._me, actions) = self._me, step
        case = self._me.investigation
        if self._me.alarms > before.alarms and case is not None:
            self._inspector = Inspector(self._collectives.folder.parent, self._local.host_id)
            if case.alarm.why == "replicas differ":
                self._replica_check.on_investigation()
        for divergence in self._me.divergences:
            self._neighbors.stop_comparing_group(divergence.group)
        for action in actions:
            self._carry_out(action)
        if self._me.is_failure_known:
            self._is_failure_known.set()

    # -- exchange of messages ------------------------------------------------------------------------------------

    def _run_round(self, seen: Observation) -> bool:
        """Publish the heartbeat of this rank, read those of its neighbors, and exchange the protocol's messages.

        Returns:
            True if another round should follow at once.
        """
        if self._me.state is State.STOPPING:  # nothing else counts, not even whether there is a process group
            replies = self._exchange(protocol.messages_of(self._me, seen.now_s))
            if replies is not None:
                self._follow(protocol.on_replies(self._me, replies, seen))
            return False
        if not self._channel.has_peers():
            return False
        if self._me.world_size != self._local.world_size:
            self._me = replace(self._me, world_size=self._local.world_size)
        logs = list(self._collectives.logs)
        neighbors = sorted(self._find_neighbors(logs))
        writes = {heartbeat_key(self._me.rank): to_json(self._local.heartbeat(self._neighbors.requests()))}
        writes |= self._neighbors.replies(logs, self._heartbeats)
        snapshot_key = protocol.snapshot_key_due(self._me, is_failing=seen.is_failing)
        if snapshot_key is not None:
            writes[snapshot_key] = self._snapshot_message()
        messages = protocol.messages_of(self._me, seen.now_s)
        polled = dict.fromkeys([*map(heartbeat_key, neighbors), *self._neighbors.reply_keys(), *messages.keys_to_poll])
        replies = self._exchange(replace(messages, writes={**writes, **messages.writes}, keys_to_poll=[*polled]))
        if replies is None:
            return False
        if snapshot_key is not None:
            self._me = protocol.on_published(self._me, is_failing=seen.is_failing)
        self._heartbeats |= {
            rank: from_json(Heartbeat, replies[key]) for rank in neighbors if (key := heartbeat_key(rank)) in replies
        }
        alarms = self._me.alarms
        self._follow(protocol.on_replies(self._me, replies, seen))
        return self._me.alarms > alarms or self._compare(logs, replies)

    def _find_neighbors(self, logs: list[CollectiveLogWriter]) -> set[int]:
        """Return the neighbors in all groups; in that of all ranks also if only process groups were made so far."""
        found = {rank for ranks in neighbors_by_group(logs, self._me.rank).values() for rank in ranks}
        if self._collectives.created_groups.latest:
            found |= {(self._me.rank + way) % self._me.world_size for way in (-1, 1)} - {self._me.rank}
        return found

    def _exchange(self, messages: Messages) -> dict[str, bytes] | None:
        """Exchange messages, or react to a store that can't be reached: switch to a folder, or log the position."""
        replies = self._channel.exchange(messages)
        if replies is None:
            self._me = protocol.on_no_reply(self._me)
            seen = self._observation()
            needs_peers = seen.is_failing or seen.idle_s > _IDLE_AFTER_S
            if self._channel.is_silent and needs_peers and not self._channel.switch_to_folder():
                self._follow(protocol.on_unreachable(self._me, seen))
        return replies

    def _snapshot_message(self) -> str:
        # Ranks that have different models fail when these are wrapped, or launch different buckets.
        may_be_the_models = self._local.failure is not None or self._local.step == 0 or bool(self._me.divergences)
        case = self._me.investigation
        snapshot = self._local.snapshot(
            {one.group: one.difference.number for one in self._me.divergences},
            with_models=may_be_the_models,
            with_replicas=case is not None and case.alarm.why == "replicas differ",
            listening=listening_endpoints() if self._me.stall_timeout_s is not None else (),
        )
        return to_json(snapshot)

    def _compare(self, logs: list[CollectiveLogWriter], replies: dict[str, bytes]) -> bool:
        """Compare collectives and replicas with the neighbors'.

        Returns:
            True if there is something to request from them, to reply, or to raise an alarm about.
        """
        requested_before = self._neighbors.requests()
        self._neighbors.look(logs, self._heartbeats)
        found = self._neighbors.on_replies(replies)
        self._follow((protocol.add_divergences(self._me, found), []))
        is_idle = self._me.state is State.IDLE
        is_quiet = is_idle and self._me.pending_alarm is None and not self._me.divergences
        made = self._collectives.created_groups.latest
        if is_quiet and self._created_group_check.found(made, self._heartbeats.values()):
            self._me = replace(self._me, pending_alarm=Alarm(by=self._me.rank, why="groups differ"))
        elif is_quiet and self._replica_check.found(self._heartbeats):
            self._me = replace(self._me, pending_alarm=Alarm(by=self._me.rank, why="replicas differ"))
        return (
            self._neighbors.requests() != requested_before
            or self._neighbors.has_unanswered_requests(self._heartbeats)
            or (bool(found) and is_idle)
        )

    # -- actions -------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Publish(key, value):
                self._exchange(Messages(writes={key: value}))
            case Judge():
                self._judge()
            case ReportFault(outcome):
                self._report(outcome)
            case RetractReport(fault, was_judge):
                self._reports.retract(self._report_numbers[fault])
                if was_judge:
                    _log.warning(
                        "the job continues (step %d): it was slow, not stuck; the report is withdrawn", self._local.step
                    )
            case LogSlow(verdict):
                _log.warning(verdict.sentence)
            case LogMayContinue(limit_s):
                _log.warning("the job may continue: it is stopped if it stalls for %.0f s", limit_s)
            case LogUnreachable():
                self._log_unreachable()
            case Abort(outcome):
                self._abort(outcome)

    def _judge(self) -> None:
        case, me = self._me.investigation, self._me
        assert case is not None
        assert self._inspector is not None
        outcome = self._inspector.judge(case, me.divergences, me.rank, me.world_size)
        self._follow(protocol.conclude(self._me, outcome, self._observation()))

    def _report(self, outcome: Outcome) -> None:
        local = self._local
        self._report_numbers[identify_fault(outcome.verdict)] = self._reports.add(
            outcome.verdict.as_dict(), outcome.message, step=local.step, process_state=local.process.state
        )
        self._on_fault()
        if outcome.judge == local.rank:
            _log.warning("what the watchdogs have found:\n%s", outcome.message)
        else:
            _log.warning("rank %d: %s; rank %d has the report", local.rank, local.position_text(), outcome.judge)

    def _log_unreachable(self) -> None:
        error = self._channel.error
        _log.warning(
            "rank %d: %s for %.1f s, and the job's store %s: is its process, usually rank 0, still alive?",
            self._local.rank,
            self._local.position_text(),
            self._local.progress_tracker.idle_s(time.monotonic()),
            "does not answer" if error is None else f"can't be reached ({error})",
        )

    def _abort(self, outcome: Outcome) -> None:
        self._is_failure_known.set()  # the other ranks know why this process ends
        if self._local.rank in outcome.verdict.named:  # it may run Python, and exit at once: ranks that wait come first
            time.sleep(_PROPAGATION_S)
        raise_in_training(outcome.verdict.sentence)
        self._publish_exit()
        time.sleep(_PROPAGATION_S)
        abort_pending_collectives(set(outcome.listening), self._flush)

    def _flush(self) -> None:
        """Flush logs before the process is ended."""
        self._before_exit()
        _log.warning("rank %d: ended with exit code %d: it did not respond", self._local.rank, WATCHDOG_ABORT_STATUS)

    # -- shutdown ------------------------------------------------------------------------------------------------

    def _publish_exit(self) -> None:
        """Publish that this rank was not killed. Does not wait if the store does not answer at once."""
        self._local.has_ended = True
        self._channel.leave()

    def _final_messages(self) -> dict[str, str]:
        heartbeat = self._local.heartbeat()
        if not heartbeat.is_final:
            heartbeat = replace(heartbeat, evidence=replace(heartbeat.evidence, liveness="ended"))
        return {heartbeat_key(self._local.rank): to_json(heartbeat)}
