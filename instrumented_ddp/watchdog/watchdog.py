"""The watchdog of a rank: compares its collectives with its neighbors', and notices stalls, while it trains.

It runs about every 0.7 s on the housekeeper's thread. It holds no lock that the training waits for beyond a read of a
few log entries, and never uses a device. Its findings are judged by the rules of ``overlapscope.diagnosis``, which
also judge finished jobs.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from instrumented_ddp.collectives.log import CollectiveLog
from instrumented_ddp.recording.background import BackgroundScheduler
from instrumented_ddp.recording.metadata import ModelRegistry
from instrumented_ddp.replicas.replicas import ReplicaComparison
from instrumented_ddp.watchdog.abort import (
    abort_pending_collectives,
    barrier_before_abort,
    listening_endpoints,
    raise_in_training,
)
from instrumented_ddp.watchdog.investigation import Investigation
from instrumented_ddp.watchdog.live_evidence import liveness_of
from instrumented_ddp.watchdog.local_rank import LocalRankMonitor
from instrumented_ddp.watchdog.peer_channel import Alarm, DivergenceLocation, Heartbeat, Outcome, PeerChannel, Round
from instrumented_ddp.watchdog.peer_comparison import NeighborComparison, ReplicaCheck, neighbors_by_group
from instrumented_ddp.watchdog.process_state import FaulthandlerDump, read_process_state
from instrumented_ddp.watchdog.progress import DEAD_RANK_STALL_LIMIT_S, STARTUP_NOTICE_S
from overlapscope.diagnosis.evidence import ExitCall, Failure
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.collective_log import CollectiveLogWriter
from overlapscope.trace.dataclass_json import from_json, to_json
from overlapscope.trace.live_files import LivenessFile
from overlapscope.trace.process_files import WATCHDOG_ABORT_STATUS, ReportLog

# Reporting of an investigation's outcome: a report file, a log message, and a retraction if the job continues.

_log: Final = logging.getLogger(__name__)

_RETRACTABLE_KINDS: Final = (
    "stuck",
    "waits for data",
    "holds the GIL",
    "stopped",
    "gradients never ready",
    "uneven inputs",
)
"""Kinds of verdict that are retracted if the job continues."""


class OutcomeReporter:
    """Reports and log messages of one rank.

    Args:
        folder: recording folder of the rank.
        own: monitor of the rank.
        on_fault: called with each fault that has not been reported before.
    """

    def __init__(self, folder: Path, own: LocalRankMonitor, on_fault: Callable[[], None]) -> None:
        self._own = own
        self._on_fault = on_fault
        self._reports = ReportLog(folder)
        self._reported: set[tuple[Any, ...]] = set()
        self._retractable: tuple[int, int, bool] | None = None
        self._slow: tuple[tuple[int, ...], int | None] | None = None
        self.no_alarm_until_idle_s = 0.0
        """Idle time in seconds up to which the stall is known, so that no alarm is raised for it again."""
        self.no_abort_until_idle_s = 0.0
        """Idle time in seconds up to which the stall is known to be no reason to abort the job."""

    def was_reported(self, *what: Any) -> bool:
        """Return whether something was noted as reported, and not retracted since."""
        return what in self._reported

    def note(self, *what: Any) -> None:
        """Note that something is reported."""
        self._reported.add(what)

    def on_progress(self) -> None:
        """Reset the idle limits, as there was progress since the last observation."""
        self.no_alarm_until_idle_s = self.no_abort_until_idle_s = 0.0

    def draw(self, outcome: Outcome) -> bool:
        """Report what was found.

        Returns:
            True if it is a fault that has not been reported before.
        """
        own, verdict = self._own, outcome.verdict
        is_judge = outcome.judge == own.rank
        if not verdict.is_fault:
            if is_judge and verdict.kind == "slow":
                self._log_slow(verdict)
            idle_s = own.progress_tracker.idle_s(time.monotonic())
            undecided_for_s = None if outcome.undecided_time_ns is None else outcome.undecided_time_ns / 1e9
            self.no_abort_until_idle_s = own.progress_tracker.next_check_idle_s(idle_s, undecided_for_s)
            # During startup the rank that others wait for was reported early: no reason to wait longer than usual.
            at_start_s = idle_s + STARTUP_NOTICE_S
            self.no_alarm_until_idle_s = at_start_s if own.progress_tracker.is_starting else self.no_abort_until_idle_s
            return False
        self.no_alarm_until_idle_s = float("inf")
        fault = (verdict.kind, verdict.group, verdict.number, *verdict.named)
        if self.was_reported(*fault):
            return False
        self.note(*fault)
        number = self._reports.add(verdict.as_dict(), outcome.message, step=own.step, process_state=own.process.state)
        if verdict.kind in _RETRACTABLE_KINDS:
            self._retractable = number, own.progress, is_judge
        self._on_fault()
        if is_judge:
            _log.warning("what the watchdogs have found:\n%s", outcome.message)
        else:
            _log.warning("rank %d: %s; rank %d has the report", own.rank, own.standing_text(), outcome.judge)
        return True

    def _log_slow(self, verdict: Verdict) -> None:
        """Log a slow rank once per step: the judge may be the slow one itself, and continue meanwhile."""
        slow = verdict.concerned[:1], verdict.step
        if slow != self._slow:
            self._slow = slow
            _log.warning(verdict.sentence)

    def report_unreachable(self, why: str) -> None:
        """Log once the last known position of this rank, as the others can't be reached."""
        if self.was_reported("store"):
            return
        self.note("store")
        _log.warning(
            "rank %d: %s for %.1f s, and the job's store %s: is its process, usually rank 0, still alive?",
            self._own.rank,
            self._own.standing_text(),
            self._own.progress_tracker.idle_s(time.monotonic()),
            why,
        )

    def should_abort(self, outcome: Outcome, alarm: Alarm, stall_timeout_s: float, *, is_new: bool) -> bool:
        """Return whether the job can't continue, or has stalled for so long that it should be aborted.

        Args:
            alarm: the alarm that started the investigation.
            patience_s: minimum stall in seconds before the job is aborted for it.
            is_news: True if nothing of this was reported before.
        """
        verdict, own = outcome.verdict, self._own
        if own.failure is not None:
            return False  # it exits anyway
        if verdict.is_fault and (verdict.certainty == "certain" or alarm.why == "patience"):
            return True
        if is_new and outcome.judge == own.rank:
            limit_s = own.progress_tracker.long_stall_s(stall_timeout_s)
            _log.warning("the job may go on: it is ended if it stands still for %.0f s", limit_s)
        return False

    def retract_after_progress(self) -> None:
        """Retract a report of a stall if there were steps since: the job was slow, not stuck."""
        if self._retractable is None or self._own.progress <= self._retractable[1] or self._own.failure is not None:
            return
        number, _, was_judge = self._retractable
        self._retractable = None
        self._reported.clear()
        self._reports.retract(number)
        if was_judge:
            _log.warning("the job goes on (step %d): slow, not stuck; the report is withdrawn", self._own.step)


# Detection of conditions on a rank that make all ranks investigate.


def detect_alarm(
    own: LocalRankMonitor,
    models: ModelRegistry,
    conclusions: OutcomeReporter,
    heartbeats: Iterable[Heartbeat],
    *,
    is_failure_unreported: bool,
    stall_timeout_s: float | None,
) -> Alarm | None:
    """Return the alarm that this rank has reason to raise; None if there is none.

    Args:
        own: monitor of this rank.
        models: DDP instances of this process.
        conclusions: what was reported so far.
        beats: latest heartbeats of the neighbors.
        failure_is_news: True if the exception that ends this process was not reported to the others yet.
        patience_s: minimum stall in seconds before the job is aborted for it; None to never abort.
    """
    if own.failure is not None and is_failure_unreported:
        return Alarm(by=own.rank, why="failure")
    if models.unreduced is not None and not conclusions.was_reported("not reduced"):
        conclusions.note("not reduced")
        return Alarm(by=own.rank, why="not reduced")
    waits_since_ns = own.waits_since_ns()
    if waits_since_ns is None:
        return None
    idle_s = min(own.progress_tracker.idle_s(time.monotonic()), (host_now_ns() - waits_since_ns) / 1e9)
    if stall_timeout_s is not None:
        end_s = own.progress_tracker.long_stall_s(stall_timeout_s)
        if idle_s >= max(end_s, conclusions.no_abort_until_idle_s):
            return Alarm(by=own.rank, why="patience")
    limit_s = DEAD_RANK_STALL_LIMIT_S if _is_any_neighbor_gone(own, heartbeats) else own.progress_tracker.notice_limit_s
    if idle_s >= max(limit_s, conclusions.no_alarm_until_idle_s):
        return Alarm(by=own.rank, why="stall")
    return None


def _is_any_neighbor_gone(own: LocalRankMonitor, heartbeats: Iterable[Heartbeat]) -> bool:
    return any(
        heartbeat.host_id == own.host_id
        and liveness_of(heartbeat, read_process_state(heartbeat.pid, heartbeat.start_ticks), None) == "gone"
        for heartbeat in heartbeats
    )


_USUAL_INTERVAL_S: Final = 0.8
_FIRST_INTERVAL_S: Final = 0.1
_LEARNS_FOR_S: Final = 5.0
_INTERVAL_WHEN_IDLE_S: Final = 0.25
_INVESTIGATION_INTERVAL_S: Final = 0.08
_IDLE_AFTER_S: Final = 0.8
_MOST_ROUNDS: Final = 3
"""Maximum number of rounds per run: one is enough unless there are requests or alarms."""
_ACTIVITY_SAMPLING_S: Final = 2.0
"""Time in seconds before the stall limit at which the activity of this process begins to be sampled."""
_LAST_WORDS_S: Final = 2.5
"""Time in seconds that a failing process waits for the verdict."""
_PROPAGATION_S: Final = 0.15
"""Time in seconds within which all ranks have read that the job is aborted."""
_INTENTIONAL_EXITS: Final = ("KeyboardInterrupt", "SystemExit", "IncidentError")
"""Exceptions by which a job is ended on purpose."""


class Watchdog:
    """The watchdog of this process; a ``Job``.

    Args:
        collectives: collective log of this process.
        models: DDP instances of this process.
        replicas: fingerprints of the models.
        housekeeper: scheduler that runs the watchdog.
        stops_after_s: minimum stall in seconds before a possibly slow job is aborted on all ranks; proven faults abort
            it at once. None to never abort.
        on_fault: called when a fault was found.
        before_exit: called before this process is ended.
    """

    name = "the watchdog"

    def __init__(
        self,
        collectives: CollectiveLog,
        models: ModelRegistry,
        replicas: ReplicaComparison,
        housekeeper: BackgroundScheduler,
        *,
        abort_after_s: float | None,
        on_fault: Callable[[], None],
        before_exit: Callable[[], None],
    ) -> None:
        self._stops_after_s = abort_after_s
        self._collectives = collectives
        self._models = models
        self._before_exit = before_exit
        self._local = LocalRankMonitor(collectives, models, replicas)
        self._replica_check = ReplicaCheck(replicas)
        self._neighbors = NeighborComparison(collectives.rank, collectives.signatures)
        self._outcome_reporter = OutcomeReporter(collectives.folder, self._local, on_fault)
        self._peer_channel = PeerChannel(
            collectives.folder.parent, collectives.rank, lambda: self._local.world_size, self._farewell
        )
        self._heartbeats: dict[int, Heartbeat] = {}
        self._divergences: list[DivergenceLocation] = []
        self._alarms = 0
        self._investigation: Investigation | None = None
        self._pending_alarm: Alarm | None = None
        self._last_published_version = (0, False)
        self._failure_reported = threading.Event()
        self._held_stacks: FaulthandlerDump | None = None
        with suppress(OSError, RuntimeError, ValueError):
            self._held_stacks = FaulthandlerDump(collectives.folder)
            self._local.dumps_stacks = True
        self._began_s = time.monotonic()
        self._alive = LivenessFile(collectives.folder)
        self._housekeeper = housekeeper
        housekeeper.add(self)

    # -- called on the training thread ---------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        """Report an exception that ends this process, and wait briefly for the verdict of all ranks."""
        if (
            os.getpid() != self._local.pid
            or not self._housekeeper.is_scheduled(self)
            or failure.type in _INTENTIONAL_EXITS
        ):
            return
        self._local.failure = failure
        self._local.how = "failed"
        self._housekeeper.wake(self)
        self._failure_reported.wait(_LAST_WORDS_S)

    def note_recording_end(self, why: str) -> None:
        """Note that recording has ended, and why. The rank still communicates, but its position is unknown."""
        self._local.unrecorded_because = why

    def exits(self, call: ExitCall | None) -> None:
        """Note that the process exits, perhaps by a call of ``sys.exit``."""
        self._local.exit_call = call

    def close(self) -> None:
        """Unregister faulthandler. May be called twice."""
        if self._held_stacks is not None:
            self._held_stacks.close()
            self._held_stacks = None

    # -- called on the housekeeper's thread ----------------------------------------------------------------------

    def run(self) -> float:
        """Observe this rank, communicate, and investigate after an alarm.

        Returns:
            The time until the next run, in seconds.
        """
        try:
            self._alive.write(*self._local.memory)
            self._look()
        except Exception:
            self._failure_reported.set()
            raise
        return self._interval_s(time.monotonic() - self._began_s)

    def end(self) -> None:
        """Publish the final heartbeat, and stop."""
        self._publish_exit()
        self._alive.close()

    def _interval_s(self, age_s: float) -> float:
        if self._investigation is not None or self._pending_alarm is not None or self._neighbors.reply_keys():
            return _INVESTIGATION_INTERVAL_S
        if self._local.progress_tracker.idle_s(time.monotonic()) > _IDLE_AFTER_S:
            interval_s = _INTERVAL_WHEN_IDLE_S
        else:
            share = min(1.0, age_s / _LEARNS_FOR_S)
            interval_s = _FIRST_INTERVAL_S + (_USUAL_INTERVAL_S - _FIRST_INTERVAL_S) * share
        return interval_s * random.uniform(0.8, 1.0)  # ranks start together, and must not poll all at the same time

    def _look(self) -> None:
        own = self._local
        if own.look():
            self._outcome_reporter.on_progress()
        idle_s = own.progress_tracker.idle_s(time.monotonic())
        if self._investigation is not None or idle_s > max(
            _IDLE_AFTER_S, own.progress_tracker.notice_limit_s - _ACTIVITY_SAMPLING_S
        ):
            own.sample_activity()
        self._outcome_reporter.retract_after_progress()
        if self._investigation is None and self._pending_alarm is None:
            self._pending_alarm = self._detect_alarm()
        for _ in range(_MOST_ROUNDS):
            if not self._run_round():
                break
        if self._investigation is not None:
            self._advance_investigation(self._investigation)

    def _detect_alarm(self) -> Alarm | None:
        is_new = not self._failure_reported.is_set()
        return detect_alarm(
            self._local,
            self._models,
            self._outcome_reporter,
            self._heartbeats.values(),
            is_failure_unreported=is_new,
            stall_timeout_s=self._stops_after_s,
        )

    # -- communication -------------------------------------------------------------------------------------------

    def _run_round(self) -> bool:
        """Do one round over the board: publish the heartbeat of this rank, and read those of its neighbors.

        Returns:
            True if another round should follow at once.
        """
        if not self._peer_channel.is_possible():
            return False
        logs, own, inquiry = list(self._collectives.logs), self._local, self._investigation
        neighbors = sorted({rank for ranks in neighbors_by_group(logs, own.rank).values() for rank in ranks})
        next_alarm = f"alarm.{self._alarms + 1}"
        writes = {f"beat.{own.rank}": to_json(own.heartbeat(self._neighbors.requests()))}
        writes |= self._neighbors.replies(logs, self._heartbeats)
        claims: dict[str, str] = {}
        keys_to_poll = [*(f"beat.{rank}" for rank in neighbors), *self._neighbors.reply_keys()]
        if inquiry is None:
            keys_to_poll.append(next_alarm)
            if self._pending_alarm is not None:
                claims[next_alarm] = to_json(self._pending_alarm)
        else:
            writes |= self._snapshot_message(inquiry)
            claims |= inquiry.claims
            keys_to_poll += inquiry.keys_to_poll
        replies = self._exchange(Round(writes=writes, keys_to_poll=keys_to_poll, claims=claims))
        if replies is None:
            return False
        self._heartbeats |= {
            rank: from_json(Heartbeat, replies[key]) for rank in neighbors if (key := f"beat.{rank}") in replies
        }
        if inquiry is not None:
            inquiry.on_replies(replies)
        elif next_alarm in replies:
            self._begin_investigation(from_json(Alarm, replies[next_alarm]))
            return True
        return self._compare(logs, replies)

    def _snapshot_message(self, inquiry: Investigation) -> dict[str, str]:
        """Return this rank's snapshot as a message; empty if it was published and nothing was added since."""
        version = (inquiry.number, self._local.failure is not None)
        if version == self._last_published_version:
            return {}
        self._last_published_version = version
        # Ranks that have different models fail when these are wrapped, or launch different buckets.
        may_be_the_models = self._local.failure is not None or self._local.step == 0 or bool(self._divergences)
        card = self._local.card(
            {one.group: one.difference.number for one in self._divergences},
            with_models=may_be_the_models,
            with_replicas=inquiry.alarm.why == "replicas differ",
            listening=listening_endpoints() if self._stops_after_s is not None else (),
        )
        return {f"card.{inquiry.number}.{self._local.rank}": to_json(card)}

    def _compare(self, logs: list[CollectiveLogWriter], replies: dict[str, bytes]) -> bool:
        """Compare collectives and replicas with the neighbors'.

        Returns:
            True if there is something to request from them, to reply, or to raise an alarm about.
        """
        asked_before = self._neighbors.requests()
        self._neighbors.look(logs, self._heartbeats)
        found = self._neighbors.on_replies(replies)
        for divergence in found:
            self._add_divergence(divergence)
            self._pending_alarm = Alarm(by=self._local.rank, why="difference", divergence=divergence)
        is_quiet = self._investigation is None and self._pending_alarm is None and not self._divergences
        if is_quiet and self._replica_check.found(self._heartbeats):
            self._pending_alarm = Alarm(by=self._local.rank, why="replicas differ")
        has_asked = self._neighbors.requests() != asked_before
        return (
            has_asked
            or self._neighbors.has_unanswered_requests(self._heartbeats)
            or (bool(found) and self._investigation is None)
        )

    def _exchange(self, round_: Round) -> dict[str, bytes] | None:
        done = self._peer_channel.exchange(round_)
        if done is not None and done.error is None:
            return done.replies
        self._last_published_version = (0, False)
        is_amiss = (
            self._local.failure is not None or self._local.progress_tracker.idle_s(time.monotonic()) > _IDLE_AFTER_S
        )
        if self._peer_channel.is_silent and is_amiss and not self._peer_channel.switch_to_folder():
            self._log_unreachable(done)
        return None

    def _add_divergence(self, divergence: DivergenceLocation) -> None:
        self._neighbors.stop_comparing_group(divergence.group)
        if all(known.group != divergence.group for known in self._divergences):
            self._divergences.append(divergence)

    # -- investigation -------------------------------------------------------------------------------------------

    def _begin_investigation(self, alarm: Alarm) -> None:
        self._alarms += 1
        self._pending_alarm = None
        self._investigation = Investigation(
            self._alarms, alarm, self._local.rank, self._local.world_size, self._collectives.folder.parent
        )
        if alarm.divergence is not None:
            self._add_divergence(alarm.divergence)
        if alarm.why == "replicas differ":
            self._replica_check.on_investigation()

    def _advance_investigation(self, inquiry: Investigation) -> None:
        own = self._local
        if inquiry.outcome is None and inquiry.is_ready_to_judge(own.host_id):
            inquiry.outcome = inquiry.judge(own.host_id, self._divergences)
            self._exchange(Round(writes={f"verdict.{inquiry.number}": to_json(inquiry.outcome)}, keys_to_poll=()))
        if inquiry.outcome is not None:
            self._investigation = None
            is_new = self._outcome_reporter.draw(inquiry.outcome)
            limit_s, alarm = self._stops_after_s, inquiry.alarm
            if limit_s is not None and self._outcome_reporter.should_abort(
                inquiry.outcome, alarm, limit_s, is_new=is_new
            ):
                self._stop(inquiry, inquiry.outcome)
            if own.failure is not None:
                self._failure_reported.set()
        elif inquiry.has_timed_out:
            self._investigation = None

    def _stop(self, inquiry: Investigation, outcome: Outcome) -> None:
        barrier_before_abort(inquiry, outcome, self._exchange)
        self._failure_reported.set()  # the other ranks know why this process ends
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

    def _log_unreachable(self, round_: Round | None) -> None:
        """Log this rank's position, as neither the other ranks nor their folders can be reached."""
        if self._local.failure is not None:
            self._failure_reported.set()
            return
        if self._detect_alarm() is not None:
            why = "does not answer" if round_ is None else f"can't be reached ({round_.error})"
            self._outcome_reporter.report_unreachable(why)

    # -- shutdown ------------------------------------------------------------------------------------------------

    def _publish_exit(self) -> None:
        """Publish that this rank was not killed. Does not wait if the board does not answer at once."""
        if self._local.how == "runs":
            self._local.how = "ended"
        self._peer_channel.leave()

    def _farewell(self) -> dict[str, str]:
        heartbeat = self._local.heartbeat()
        return {
            f"beat.{heartbeat.rank}": to_json(
                replace(heartbeat, how="ended" if heartbeat.how == "runs" else heartbeat.how)
            )
        }
