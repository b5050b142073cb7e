"""Garbage collection stops the whole process: which collections did, and for how long.

A collection runs on whichever thread happened to allocate, at any point of a step, and a full one takes as long as
a model has Python objects. A rank that collects while the others wait for its bucket looks slow for no reason that
its code shows. Young collections are frequent and short, and are left out.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, Final

from instrumented_ddp.timing import host_now_ns
from overlapscope.trace.format import Kind, pack_body
from overlapscope.trace.writer import EventLog

_SHORTEST_PAUSE_NS: Final = 50_000
_PAUSE_RECORDS: Final = tuple(pack_body(Kind.PAUSE, index=generation) for generation in range(3))
"""A pause, by the generation that was collected."""


class GcPauses:
    """Writes a record for every collection that took long enough to matter.

    Args:
        log: where the records go.
        current_step: tells which step the host is in.
    """

    def __init__(self, log: EventLog, current_step: Callable[[], int]) -> None:
        self._log = log
        self._current_step = current_step
        self._start_ns = 0
        self._pid = os.getpid()
        gc.callbacks.append(self._collects)

    def close(self) -> None:
        """Record no more. May be called twice."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the collector before and after; there is never more than one collection in a process."""
        if phase == "start":
            self._start_ns = host_now_ns()
            return
        end_ns = host_now_ns()
        # A forked process, such as a data loader's, collects too, and shares the log's memory with us.
        if end_ns - self._start_ns >= _SHORTEST_PAUSE_NS and os.getpid() == self._pid:
            self._log.append(_PAUSE_RECORDS[info["generation"]], self._current_step(), self._start_ns, end_ns)
