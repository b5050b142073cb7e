"""Detection of the end of collectives on a device, by periodic polling on a separate thread.

Nothing here waits for the device. Exact ends of buckets are measured by ``timing``; here it is enough to know what has
ended, within milliseconds. Until then one of these is kept of a collective, in order of preference:

``Work.get_future_result()`` (NCCL, torch 2.13)
    Completed by NCCL's own watchdog when the device is done, with whether that was by an error. It keeps no tensor
    alive, and querying it takes no CUDA lock. It never completes where NCCL's watchdog does not see the work: under
    ``TORCH_NCCL_BLOCKING_WAIT``, and for members of a batch such as ``batch_isend_irecv``.
the work
    Its outputs live until it is seen to have ended, and a poll may wait for a CUDA lock. After an error it has ended.
an event without timing
    For a synchronous collective, which has no work since torch 2.8: recorded on the stream that waits for it.

For a collective that does not end, it is also reported whether its device has reached it. Hosts run ahead: if a
device is stuck before a collective in which the other ranks' devices wait, the log would only show that the rank has
launched it. So an event without timing is recorded before each collective, on the stream that it is launched on, as
NCCL does itself (``syncStream`` of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). It is not queried immediately.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from instrumented_ddp.collectives.device_events import (
    DeviceEvent,
    DeviceEvents,
    find_driver,
    is_capturing,
    make_device_events,
)
from instrumented_ddp.collectives.roles import OnEnd
from overlapscope.trace.clocks import host_now_ns

_log = logging.getLogger(__name__)

OnReachedChange = Callable[[bool], None]
"""Callback with whether a device has reached a collective."""

_POLL_INTERVAL_S: Final = 0.005
_IDLE_POLL_INTERVAL_S: Final = 0.05
"""Polling interval for collectives that have not ended for a while, such as hanging ones; reached a third of a second
after the last launch."""
_FINAL_POLL_S: Final = 0.2
_JOIN_S: Final = 1.0
_SUCCESS: Final = 0
"""``WorkResult.SUCCESS`` of torch/csrc/distributed/c10d/Work.hpp, which futures hold as a number."""
_THREAD_LOCAL_CAPTURE: Final = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`` of cuda.h."""


class _DeviceCollective:
    """A collective, and how to detect its end: one of ``result``, ``work`` and ``event``."""

    __slots__ = ("before", "device", "event", "is_reached", "on_end", "on_reached_change", "result", "work")

    def __init__(
        self,
        device: torch.device,
        on_end: tuple[OnEnd, ...],
        before: DeviceEvent | None,
        on_reached_change: OnReachedChange | None,
    ) -> None:
        self.device = device
        self.on_end = on_end
        self.before = before
        self.on_reached_change = on_reached_change
        self.is_reached: bool | None = None
        self.result: torch._C.Future[Any] | None = None
        self.work: dist.Work | None = None
        self.event: DeviceEvent | None = None

    def poll(self) -> bool | None:
        """Return None while it runs, then whether it has failed."""
        try:
            if self.result is not None:
                return self.result.value() != _SUCCESS if self.result.done() else None
            if self.event is not None:
                return False if self.event.query() else None
            assert self.work is not None
            return has_failed(self.work.get_future()) if self.work.is_completed() else None
        except Exception:  # from the backend or the device: it has ended
            return True

    def poll_reached(self) -> None:
        """Report whether the device has reached it, when that has changed."""
        if self.before is None or self.on_reached_change is None or self.is_reached:
            return
        is_reached = self.before.query()
        if is_reached != self.is_reached:
            self.is_reached = is_reached
            self.on_reached_change(is_reached)


class DeviceCompletionPoller:
    """Polling thread for collectives on devices, the back end of ``CompletionWatch`` for them.

    Args:
        device: device on which the first of them runs.
        report: called with the callbacks of a collective that has ended, the time, and whether it has failed.
        on_error: as for ``CompletionWatch``.
    """

    def __init__(
        self,
        device: torch.device,
        report: Callable[[tuple[OnEnd, ...], int, bool], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._device = device
        self._report = report
        self._launched: deque[_DeviceCollective] = deque()
        self._events: dict[torch.device, DeviceEvents] = {}
        """Events by device."""
        self._wake = threading.Event()
        self._is_idle = False
        self._has_failed = False
        self._closed = False
        self._poll_lock = threading.Lock()
        self._in_flight: list[_DeviceCollective] = []
        self._has_results = not _blocks_in_wait()
        _call_before_group_destruction(self._drop_works, on_error)
        self._thread = threading.Thread(target=self._watch, name="overlapscope-device-completion", daemon=True)
        self._thread.start()

    def add(
        self,
        work: dist.Work | None,
        device: torch.device,
        on_end: tuple[OnEnd, ...],
        before: DeviceEvent | None,
        on_reached_change: OnReachedChange | None,
    ) -> None:
        """Watch a collective that has just been launched, see ``CompletionWatch.add``."""
        one = _DeviceCollective(device, on_end, before, on_reached_change)
        if device.type == "cuda" and is_capturing():  # captured, not launched: its end would never be seen
            self._report(on_end, host_now_ns(), False)
            return
        if work is not None:
            one.result = self._get_result(work)
            one.work = work if one.result is None else None
        elif device.type == "cuda":
            one.event = self._get_events(device).record()
        else:
            self._report(on_end, host_now_ns(), False)
            return
        self._launched.append(one)
        if self._is_idle:  # waking the thread for each of many would cost more than all other work for them
            self._is_idle = False
            self._wake.set()

    def mark_before(self, device: torch.device) -> DeviceEvent | None:
        """Record an event on the current stream that shows whether a device has reached the next collective on it.

        Returns:
            None if nothing can be marked: in a capture, or on a device that has failed or is not a CUDA device.
        """
        if device.type != "cuda":
            return None
        try:
            return self._get_events(device).record()
        except RuntimeError:  # the launch will raise it too
            return None

    def _get_events(self, device: torch.device) -> DeviceEvents:
        events = self._events.get(device)
        if events is None:
            events = self._events[device] = make_device_events(device)
        return events

    def close(self) -> None:
        """Report what has ended, without waiting for collectives that hang."""
        self._closed = True
        self._wake.set()
        self._thread.join(_JOIN_S)

    def _get_result(self, work: dist.Work) -> torch._C.Future[Any] | None:
        # Inside a coalescing block, NCCL's watchdog is given the batch and never its members.
        if not self._has_results or distributed_c10d._world.pg_coalesce_state:
            return None
        try:
            result: torch._C.Future[Any] = work.get_future_result()  # type: ignore[attr-defined]
        except Exception:  # torch before 2.13, and other backends; later works are not asked
            self._has_results = False
            return None
        return result

    def _drop_works(self) -> None:
        """Drop works before their group is destroyed: a work may refer to its communicator, which the group frees."""
        with self._poll_lock:
            self._collect_launched()
            self._in_flight = [one for one in self._in_flight if one.work is None]

    def _watch(self) -> None:
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # the device has failed, which polling reports as well
                torch.cuda.set_device(self._device)  # otherwise the first poll would allocate memory on device 0
            _ignore_captures_of_other_threads()
        pause_s = _POLL_INTERVAL_S
        while not self._closed:
            self._poll()
            if not self._in_flight and not self._launched:
                self._wait_for_launch()
            if self._launched:
                pause_s = _POLL_INTERVAL_S
            time.sleep(pause_s)
            if pause_s == _IDLE_POLL_INTERVAL_S:
                self._poll_reached()
            pause_s = min(pause_s * 1.2, _IDLE_POLL_INTERVAL_S)
        deadline = time.monotonic() + _FINAL_POLL_S
        self._poll()
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
            self._poll()

    def _poll(self) -> None:
        with self._poll_lock:
            self._collect_launched()
            running = []
            for one in self._in_flight:
                failed = one.poll()
                if failed is None:
                    running.append(one)
                else:
                    self._has_failed |= failed
                    self._report(one.on_end, host_now_ns(), failed)
            self._in_flight = running

    def _poll_reached(self) -> None:
        if self._has_failed:  # aborting a communicator releases devices, which then reach later collectives
            return
        try:
            for one in self._in_flight:
                one.poll_reached()
        except Exception as error:  # the device has failed, which the next poll reports
            _log.debug("how far %s has come can't be told: %r", self._device, error)

    def _collect_launched(self) -> None:
        self._in_flight += [self._launched.popleft() for _ in range(len(self._launched))]

    def _wait_for_launch(self) -> None:
        self._wake.clear()
        self._is_idle = True
        if not self._launched and not self._closed:  # otherwise it came before it could know that it has to wake us
            self._wake.wait()
        self._is_idle = False


def has_failed(future: torch._C.Future[Any]) -> bool:
    """Return whether a completed future holds an exception."""
    try:
        future.value()
    except Exception:
        return True
    return False


def _blocks_in_wait() -> bool:
    return os.environ.get("TORCH_NCCL_BLOCKING_WAIT", os.environ.get("NCCL_BLOCKING_WAIT", "0")) not in ("", "0")


def _ignore_captures_of_other_threads() -> None:
    """Allow this thread to query events while another one captures a CUDA graph.

    A capture that begins in the global mode, which is the default, forbids ``cudaEventQuery`` to all threads that are
    in the global mode themselves, and is invalidated by it. NCCL's own watchdog does the same.
    """
    with suppress(OSError, AttributeError):  # no NVIDIA driver, as with ROCm
        mode = ctypes.c_int(_THREAD_LOCAL_CAPTURE)
        ctypes.CDLL(find_driver()).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _call_before_group_destruction(act: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        try:
            act()
        except Exception as error:
            on_error(error)
        original(*args, **kwargs)

    for module in list(sys.modules.values()):  # also modules that imported it by name
        if getattr(module, "__dict__", {}).get("destroy_process_group") is original:
            module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
