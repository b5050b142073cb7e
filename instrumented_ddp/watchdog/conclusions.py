"""Reporting of an investigation's outcome: a report file, a log message, and a retraction if the job continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from instrumented_ddp.watchdog.messages import Alarm, Outcome
from instrumented_ddp.watchdog.own_state import LocalRankMonitor
from instrumented_ddp.watchdog.stall import STARTUP_NOTICE_S
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.reports import ReportLog

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
