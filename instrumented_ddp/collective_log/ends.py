"""Sees the collectives of a log end: by looking now and then, so that nothing waits for them, and they for nothing.

Exact ends of buckets are ``completion``'s affair; here it is enough to know what has ended, within milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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
        self._launched: deque[InFlight] = deque()
        self._wake = threading.Event()
        self._is_idle = False
        self._closed = False
        self._thread = threading.Thread(target=self._look, name="overlapscope-collectives", daemon=True)
        self._thread.start()

    def add(self, launched: InFlight) -> None:
        """Look after a collective, which has its work."""
        self._launched.append(launched)
        if self._is_idle:  # to wake it for each of many would cost them more than all else that is done for them
            self._is_idle = False
            self._wake.set()

    def close(self) -> None:
        """Write down what has ended. What hangs is not waited for."""
        self._closed = True
        self._wake.set()
        self._thread.join(1.0)

    def _look(self) -> None:
        in_flight: list[InFlight] = []
        pause_s = _LOOK_EVERY_S
        while not self._closed:
            in_flight = [one for one in in_flight if not _has_ended(one)]
            if not in_flight and not self._launched:
                self._wait_for_one()
            if self._launched:
                pause_s = _LOOK_EVERY_S
                in_flight += self._take()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LOOK_IDLY_EVERY_S)
        in_flight += self._take()
        deadline = time.monotonic() + _LAST_LOOKS_S
        while (in_flight := [one for one in in_flight if not _has_ended(one)]) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def _wait_for_one(self) -> None:
        self._wake.clear()
        self._is_idle = True
        if not self._launched and not self._closed:  # else it came before it could know that it has to wake us
            self._wake.wait()
        self._is_idle = False

    def _take(self) -> list[InFlight]:
        return [self._launched.popleft() for _ in range(len(self._launched))]


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
