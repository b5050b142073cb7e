"""Detection of conditions on a rank that make all ranks investigate."""

from __future__ import annotations

import time
from collections.abc import Iterable

from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.watchdog.conclusions import OutcomeReporter
from instrumented_ddp.watchdog.live_evidence import liveness_of
from instrumented_ddp.watchdog.messages import Alarm, Heartbeat
from instrumented_ddp.watchdog.own_state import LocalRankMonitor
from instrumented_ddp.watchdog.process_state import read_process_state
from instrumented_ddp.watchdog.stall import DEAD_RANK_STALL_LIMIT_S
from overlapscope.trace.host import host_now_ns


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
