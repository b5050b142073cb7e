"""Sees the collectives of a log end: by looking now and then, so that nothing waits for them, and they for nothing.

Exact ends of buckets are ``completion``'s affair; here it is enough to know what has ended, within milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

import torch.distributed as dist

from instrumented_ddp.timing import host_now_ns
from overlapscope.trace.group_log import GroupLog

_LOOK_EVERY_S: Final = 0.005
_LOOK_IDLY_EVERY_S: Final = 0.05
"""For collectives that have not ended for a while, as those that hang."""
_LAST_LOOKS_S: Final = 0.2


@dataclass(kw_only=True)
class InFlight:
    """A collective that was announced."""

    log: GroupLog
    number: int
    on_launch: Callable[[dist.Work], None] | None
    work: dist.Work | None = None


class Ends:
    """Writes down when collectives have ended, on a thread of its own."""

    def __init__(self) -> None:
        self._launched: SimpleQueue[InFlight | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._look, name="overlapscope-collectives", daemon=True)
        self._thread.start()

    def add(self, launched: InFlight) -> None:
        """Look after a collective, which has its work."""
        self._launched.put(launched)

    def close(self) -> None:
        """Write down what has ended. What hangs is not waited for."""
        self._closed = True
        self._launched.put(None)
        self._thread.join(1.0)

    def _look(self) -> None:
        in_flight: list[InFlight] = []
        pause_s = _LOOK_EVERY_S
        while not self._closed:
            try:
                launched = self._launched.get(timeout=None if not in_flight else pause_s)
                while launched is not None:
                    in_flight.append(launched)
                    pause_s = _LOOK_EVERY_S
                    launched = self._launched.get_nowait()
            except Empty:
                pause_s = min(pause_s * 1.2, _LOOK_IDLY_EVERY_S)
            in_flight = [one for one in in_flight if not _has_ended(one)]
        deadline = time.monotonic() + _LAST_LOOKS_S
        while in_flight and time.monotonic() < deadline:
            in_flight = [one for one in in_flight if not _has_ended(one)]
            time.sleep(_LOOK_EVERY_S)


def _has_ended(one: InFlight) -> bool:
    work = one.work
    assert work is not None
    try:
        if not work.is_completed():
            return False
    except Exception:  # of the backend: it is over
        one.log.completed(one.number, host_now_ns(), failed=True)
        return True
    one.log.completed(one.number, host_now_ns(), failed=_has_failed(work))
    return True


def _has_failed(work: dist.Work) -> bool:
    try:
        future = work.get_future()
    except Exception:  # sends and receives have none
        return False
    try:
        future.value()
    except Exception:
        return True
    return False
