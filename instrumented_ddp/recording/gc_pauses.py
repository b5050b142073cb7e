"""Garbage collections that stopped the process, and for how long.

A collection runs on whichever thread happened to allocate, at any point of a step, and a full one takes as long as
a model has Python objects. A rank that collects while the others wait for its bucket looks slow for no reason visible
in its code. Young collections are frequent and short, so they are left out.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any, Final

from instrumented_ddp.collective_log.position import Position
from overlapscope.trace.format import Kind, pack_body
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.writer import EventLog

_SHORTEST_PAUSE_NS: Final = 50_000
_PAUSE_RECORDS: Final = tuple(pack_body(Kind.PAUSE, index=generation) for generation in range(3))
"""The constant part of a pause's record, by the generation collected."""


class GcPauses:
    """Writes a record for every collection that took long enough to matter.

    Args:
        log: where the records go.
        position: of this rank.
    """

    def __init__(self, log: EventLog, position: Position) -> None:
        self._log = log
        self._position = position
        self._start_ns = 0
        self._pid = os.getpid()
        gc.callbacks.append(self._collects)

    def close(self) -> None:
        """Stop recording. May be called twice."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the collector before and after; there is never more than one collection in a process."""
        if phase == "start":
            self._start_ns = host_now_ns()
            return
        end_ns = host_now_ns()
        # A forked process, such as a data loader's, collects too, and shares the log's memory with us.
        if self._log.closed or os.getpid() != self._pid:
            return
        if end_ns - self._start_ns >= _SHORTEST_PAUSE_NS:
            # Without a log there is nobody to tell: whoever else writes to it says so.
            with suppress(Exception):
                self._log.append(_PAUSE_RECORDS[info["generation"]], self._position.step, self._start_ns, end_ns)
