"""Notices when collectives end that run on a device: by looking now and then, on a thread of its own.

Nothing here waits for the device. Exact ends of buckets are the timer's affair (``timing``); here it is enough to know
what has ended, within milliseconds. What is kept of a collective until then, in this order:

``Work.get_future_result()`` (NCCL, torch 2.13)
    NCCL's own watchdog completes it when the device is done, and says whether that was by an error. It keeps no tensor,
    and asking it takes no lock of CUDA's. It never completes where NCCL's watchdog does not see the work: under
    ``TORCH_NCCL_BLOCKING_WAIT``, and for members of a batch such as ``batch_isend_irecv``.
the work
    Its outputs live until it is seen to be over, and the look may wait for a lock of CUDA's. After an error it is over.
an event without timing
    Of a synchronous collective, which has no work since torch 2.8: recorded on the stream that waits for it.

Of a collective that does not end it is also told whether its device has come to it at all. Hosts run ahead: of a rank
whose device is stuck before a collective in which others' wait, the log would only say that it has launched it. So an
event without timing is recorded before each, on the stream that it is launched on, as NCCL does itself (``syncStream``
of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). Nobody asks for it before a while has passed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from overlapscope.trace.host import host_now_ns

_log = logging.getLogger(__name__)
_has_seen_a_capture = False

OnEnd = Callable[[int, bool], None]
"""Told of the end of something: when it was seen, in host nanoseconds, and whether it has failed."""
OnLook = Callable[[bool], None]
"""Told whether a device has come to a collective."""

_LOOK_EVERY_S: Final = 0.005
_LOOK_IDLY_EVERY_S: Final = 0.05
"""For collectives that have not ended for a while, as those that hang: a third of a second since the last launch."""
_LAST_LOOKS_S: Final = 0.2
_JOIN_S: Final = 1.0
_SUCCESS: Final = 0
"""``WorkResult.SUCCESS`` of torch/csrc/distributed/c10d/Work.hpp, which futures hold as a number."""
_THREAD_LOCAL_CAPTURE: Final = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`` of cuda.h."""


def is_capturing() -> bool:
    """Whether what the current stream is given goes into a CUDA graph instead of to the device. Said once."""
    global _has_seen_a_capture
    if not torch.cuda.is_current_stream_capturing():
        return False
    if not _has_seen_a_capture:
        _has_seen_a_capture = True
        _log.warning("a CUDA graph is being captured: what runs inside graphs is not recorded")
    return True


class _InFlight:
    """A collective, and how to see that it is over: one of ``result``, ``work`` and ``event``."""

    __slots__ = ("before", "device", "event", "is_reached", "on_end", "on_look", "result", "work")

    def __init__(self, device: torch.device, on_end: tuple[OnEnd, ...]) -> None:
        self.device = device
        self.on_end = on_end
        self.before: torch.cuda.Event | None = None
        self.on_look: OnLook | None = None
        self.is_reached: bool | None = None
        self.result: torch._C.Future[Any] | None = None
        self.work: dist.Work | None = None
        self.event: torch.cuda.Event | None = None

    def look(self) -> bool | None:
        """None while it runs; then whether it has failed."""
        try:
            if self.result is not None:
                return self.result.value() != _SUCCESS if self.result.done() else None
            if self.event is not None:
                return False if self.event.query() else None
            assert self.work is not None
            return has_failed(self.work.get_future()) if self.work.is_completed() else None
        except Exception:  # of the backend or the device: it is over
            return True

    def look_whether_reached(self) -> None:
        """Tell whether the device has come to it, unless that has been told."""
        if self.before is None or self.on_look is None or self.is_reached:
            return
        is_reached = self.before.query()
        if is_reached != self.is_reached:
            self.is_reached = is_reached
            self.on_look(is_reached)


class DeviceCompletionWatch:
    """Tells when collectives on devices end.

    Args:
        device: where the first of them runs.
        on_error: as for ``CompletionWatch``.
    """

    def __init__(self, device: torch.device, on_error: Callable[[Exception], None]) -> None:
        self._device = device
        self._on_error = on_error
        self._launched: deque[_InFlight] = deque()
        self._pools: defaultdict[torch.device, list[torch.cuda.Event]] = defaultdict(list)
        """Events of what is over, each for its own device. To make one takes longer than to record it."""
        self._wake = threading.Event()
        self._is_idle = False
        self._has_failed = False
        self._closed = False
        self._looking = threading.Lock()
        self._in_flight: list[_InFlight] = []
        self._has_results = not _blocks_in_wait()
        _call_before_groups_go(self._forget_works, on_error)
        self._thread = threading.Thread(target=self._watch, name="overlapscope-device-completion", daemon=True)
        self._thread.start()

    def add(
        self,
        work: dist.Work | None,
        device: torch.device,
        *on_end: OnEnd,
        before: torch.cuda.Event | None = None,
        on_look: OnLook | None = None,
    ) -> None:
        """Watch a collective that has just been launched.

        Args:
            work: None of a synchronous one.
            on_end: as for ``CompletionWatch.add``.
            before: what ``mark_before`` gave.
            on_look: told whether the device has come to it, when that has changed, if its end is long in coming.
        """
        one = _InFlight(device, on_end)
        one.before, one.on_look = before, on_look
        if device.type == "cuda" and is_capturing():  # it is not launched: nothing of it will ever be seen to end
            self._tell(one, failed=False)
            return
        if work is not None:
            one.result = self._result_of(work)
            one.work = work if one.result is None else None
        elif device.type == "cuda":
            one.event = self._mark(device)
        else:
            self._tell(one, failed=False)
            return
        self._launched.append(one)
        if self._is_idle:  # to wake it for each of many would cost them more than all else that is done for them
            self._is_idle = False
            self._wake.set()

    def mark_before(self, device: torch.device) -> torch.cuda.Event | None:
        """What tells whether a device has come to a collective that is about to be launched on its current stream.

        None if nothing can be marked: in a capture, on a device that has failed or that is none of CUDA's.
        """
        if device.type != "cuda":
            return None
        try:
            return None if is_capturing() else self._mark(device)
        except RuntimeError:  # the launch will meet it too
            return None

    def _mark(self, device: torch.device) -> torch.cuda.Event:
        pool = self._pools[device]
        event = pool.pop() if pool else torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def close(self) -> None:
        """Tell of what has ended. What hangs is not waited for."""
        self._closed = True
        self._wake.set()
        self._thread.join(_JOIN_S)

    def _result_of(self, work: dist.Work) -> torch._C.Future[Any] | None:
        # Where collectives are being put together, NCCL's watchdog is given the whole and never its members.
        if not self._has_results or distributed_c10d._world.pg_coalesce_state:
            return None
        try:
            result: torch._C.Future[Any] = work.get_future_result()  # type: ignore[attr-defined]
        except Exception:  # torch's before 2.13, and other backends; the next ones are not asked
            self._has_results = False
            return None
        return result

    def _forget_works(self) -> None:
        """A work may point at its communicator, which a process group takes with it when it goes."""
        with self._looking:
            self._take()
            self._in_flight = [one for one in self._in_flight if one.work is None]

    def _watch(self) -> None:
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # it has failed, which the looks say as well
                torch.cuda.set_device(self._device)  # else the first look would claim memory on device 0
            _ignore_captures_of_other_threads()
        pause_s = _LOOK_EVERY_S
        while not self._closed:
            self._look()
            if not self._in_flight and not self._launched:
                self._wait_for_one()
            if self._launched:
                pause_s = _LOOK_EVERY_S
            time.sleep(pause_s)
            if pause_s == _LOOK_IDLY_EVERY_S:
                self._look_whether_reached()
            pause_s = min(pause_s * 1.2, _LOOK_IDLY_EVERY_S)
        deadline = time.monotonic() + _LAST_LOOKS_S
        self._look()
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
            self._look()

    def _look(self) -> None:
        with self._looking:
            self._take()
            running = []
            for one in self._in_flight:
                failed = one.look()
                if failed is None:
                    running.append(one)
                else:
                    self._has_failed |= failed
                    self._tell(one, failed=failed)
                    self._pools[one.device] += [event for event in (one.before, one.event) if event is not None]
            self._in_flight = running

    def _look_whether_reached(self) -> None:
        if self._has_failed:  # a communicator that is aborted lets go of devices, which then come to what is behind
            return
        try:
            for one in self._in_flight:
                one.look_whether_reached()
        except Exception as error:  # a device that has failed, of which the next look tells
            _log.debug("how far %s has come can't be told: %r", self._device, error)

    def _tell(self, one: _InFlight, *, failed: bool) -> None:
        now_ns = host_now_ns()
        for tell in one.on_end:
            try:
                tell(now_ns, failed)
            except Exception as error:
                if not self._closed:  # else its log was closed a moment ago
                    self._on_error(error)

    def _take(self) -> None:
        self._in_flight += [self._launched.popleft() for _ in range(len(self._launched))]

    def _wait_for_one(self) -> None:
        self._wake.clear()
        self._is_idle = True
        if not self._launched and not self._closed:  # else it came before it could know that it has to wake us
            self._wake.wait()
        self._is_idle = False


def has_failed(future: torch._C.Future[Any]) -> bool:
    """Whether a future that is done holds an exception."""
    try:
        future.value()
    except Exception:
        return True
    return False


def _blocks_in_wait() -> bool:
    return os.environ.get("TORCH_NCCL_BLOCKING_WAIT", os.environ.get("NCCL_BLOCKING_WAIT", "0")) not in ("", "0")


def _ignore_captures_of_other_threads() -> None:
    """Let this thread ask events while another one captures a CUDA graph.

    A capture that begins in the global mode, which is the default, forbids ``cudaEventQuery`` to all threads that are
    in the global mode themselves, and is invalidated by it. NCCL's own watchdog does the same.
    """
    with suppress(OSError, AttributeError):  # no NVIDIA driver, as with ROCm
        mode = ctypes.c_int(_THREAD_LOCAL_CAPTURE)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _call_before_groups_go(act: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        try:
            act()
        except Exception as error:
            on_error(error)
        original(*args, **kwargs)

    for module in list(sys.modules.values()):  # also those that have imported it by its name
        if getattr(module, "__dict__", {}).get("destroy_process_group") is original:
            module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
