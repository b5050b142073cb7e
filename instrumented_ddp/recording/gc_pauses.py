"""Pauses of the process by Python's garbage collector.

A collection runs on whichever thread happened to allocate, at any point of a step, and a full one takes longer the more
Python objects a model has. A rank that collects while the others wait for its bucket looks slow for no reason visible
in its code. Young collections are frequent and short, so they are omitted.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any, Final

from instrumented_ddp.collective_log.position import TrainingPosition
from overlapscope.trace.format import Kind, pack_body
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.writer import EventLogWriter

_SHORTEST_PAUSE_NS: Final = 50_000
_PAUSE_RECORDS: Final = tuple(pack_body(Kind.PAUSE, index=generation) for generation in range(3))
"""The constant part of a pause's record, by the generation collected."""


class GcPauses:
    """Writes a record for every collection that took at least ``_SHORTEST_PAUSE_NS``.

    Args:
        log: receives the records.
        position: position of this rank.
    """

    def __init__(self, log: EventLogWriter, position: TrainingPosition) -> None:
        self._log = log
        self._position = position
        self._start_ns = 0
        self._pid = os.getpid()
        gc.callbacks.append(self._on_gc)

    def close(self) -> None:
        """Stop recording. May be called twice."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        """Note the start, or record the end, of a collection; a process never has two at a time."""
        if phase == "start":
            self._start_ns = host_now_ns()
            return
        end_ns = host_now_ns()
        # A forked process, such as a data loader's, collects too, and shares the log's memory with us.
        if self._log.closed or os.getpid() != self._pid:
            return
        if end_ns - self._start_ns >= _SHORTEST_PAUSE_NS:
            # An error of the log can't be reported from here; its other writers report it.
            with suppress(Exception):
                self._log.append(_PAUSE_RECORDS[info["generation"]], self._position.step, self._start_ns, end_ns)
