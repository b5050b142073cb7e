"""Detection of conditions on a rank that make all ranks investigate."""

from __future__ import annotations

import time
from collections.abc import Iterable

from instrumented_ddp.recording.models import Models
from instrumented_ddp.watchdog.conclusions import Conclusions
from instrumented_ddp.watchdog.live_evidence import liveness_of
from instrumented_ddp.watchdog.messages import Alarm, Beat
from instrumented_ddp.watchdog.own_state import OwnState
from instrumented_ddp.watchdog.process_state import look_at
from instrumented_ddp.watchdog.stall import PATIENCE_WITH_THE_DEAD_S
from overlapscope.trace.host import host_now_ns


def what_is_amiss(
    own: OwnState,
    models: Models,
    conclusions: Conclusions,
    beats: Iterable[Beat],
    *,
    failure_is_news: bool,
    patience_s: float | None,
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
    if own.failure is not None and failure_is_news:
        return Alarm(by=own.rank, why="failure")
    if models.unreduced is not None and not conclusions.was_said("not reduced"):
        conclusions.note("not reduced")
        return Alarm(by=own.rank, why="not reduced")
    waits_since_ns = own.waits_since_ns()
    if waits_since_ns is None:
        return None
    idle_s = min(own.rhythm.idle_s(time.monotonic()), (host_now_ns() - waits_since_ns) / 1e9)
    if patience_s is not None:
        end_s = own.rhythm.long_standstill_s(patience_s)
        if idle_s >= max(end_s, conclusions.patient_until_idle_s):
            return Alarm(by=own.rank, why="patience")
    limit_s = PATIENCE_WITH_THE_DEAD_S if _somebody_is_gone(own, beats) else own.rhythm.noticed_after_s
    if idle_s >= max(limit_s, conclusions.quiet_until_idle_s):
        return Alarm(by=own.rank, why="stall")
    return None


def _somebody_is_gone(own: OwnState, beats: Iterable[Beat]) -> bool:
    return any(
        beat.host_id == own.host_id and liveness_of(beat, look_at(beat.pid, beat.start_ticks), None) == "gone"
        for beat in beats
    )
