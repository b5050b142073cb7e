"""This rank's replica of one model, fingerprinted a few tensors at a time as forwards begin."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from instrumented_ddp.recording.background import never_raise
from instrumented_ddp.replicas.fingerprint import Fingerprint
from overlapscope.trace.live_files import FINAL_PASS, fingerprint_residue

_ROWS: Final = 64
"""Maximum number of passes in transfer from a device; a pass that finds all rows in use is discarded."""
_ZERO_MASK: Final = -0x0123456789ABCDEF
"""XORed with each fingerprint: 0, the fingerprint of zeros, is stored for one that was not taken."""


class HostRows:
    """Fingerprints of a pass, computed on the host, where results are available at once.

    Args:
        tensors: number of tensors.
    """

    def __init__(self, tensors: int) -> None:
        self._row = torch.zeros(tensors, dtype=torch.int64)
        self.results = list(self._row.unbind())
        self.is_taken = bytearray(tensors)

    def clear(self) -> None:
        """Begin a pass."""
        self.is_taken[:] = bytes(len(self.is_taken))

    def discard(self, indices: tuple[int, ...]) -> None:
        """Discard the fingerprints of some tensors."""
        for index in indices:
            self.is_taken[index] = False

    def finish_pass(self, pass_: Any, finished: deque[Any]) -> None:
        """Finish a pass."""
        if any(self.is_taken):
            finished.append(pass_._replace(values=_values(self._row.numpy(), bytes(self.is_taken))))

    def collect(self, finished: deque[Any]) -> None:
        """Do nothing: finished passes are available at once."""


class DeviceRows(HostRows):
    """Fingerprints computed on a CUDA device, collected once the device has finished without waiting for it.

    Args:
        tensors: number of tensors.
        device: device on which they are computed.
    """

    def __init__(self, tensors: int, device: torch.device) -> None:
        self.is_taken = bytearray(tensors)
        self._device_row = torch.zeros(tensors, dtype=torch.int64, device=device)
        self.results = list(self._device_row.unbind())
        self._host_rows = torch.zeros((_ROWS, tensors), dtype=torch.int64, pin_memory=True)
        self._free = deque(range(_ROWS))
        self._in_transfer: deque[tuple[int, torch.cuda.Event, bytes, Any]] = deque()

    def clear(self) -> None:
        """Begin a pass after the copy of the previous one: the current stream may be another one now."""
        super().clear()
        if self._in_transfer and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device_row.device).wait_event(self._in_transfer[-1][1])

    def finish_pass(self, pass_: Any, finished: deque[Any]) -> None:  # noqa: ARG002 - it is not available yet
        """Enqueue the copy to the host."""
        if not any(self.is_taken) or not self._free or torch.cuda.is_current_stream_capturing():
            return
        number = self._free.popleft()
        self._host_rows[number].copy_(self._device_row, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device_row.device))
        self._in_transfer.append((number, event, bytes(self.is_taken), pass_))

    def collect(self, finished: deque[Any]) -> None:
        """Collect the passes that have arrived. Called on another thread."""
        while self._in_transfer and self._in_transfer[0][1].query():
            number, _, is_taken, pass_ = self._in_transfer[0]
            finished.append(pass_._replace(values=_values(self._host_rows[number].numpy(), is_taken)))
            self._in_transfer.popleft()
            self._free.append(number)


def _values(row: npt.NDArray[np.int64], is_taken: bytes) -> bytes:
    """Return the fingerprints as they are stored, 0 for those that were not taken."""
    return np.where(np.frombuffer(is_taken, dtype=bool), row ^ _ZERO_MASK, 0).astype("<i8").tobytes()


MAX_COST_SHARE: Final = 0.001
"""Maximum share of a step's time."""
MAX_PERIOD: Final = 4096
_WARM_UP_PASSES: Final = 1
"""Number of passes that are not measured."""
_MEASURED_PASSES: Final = 3
"""Number of measured passes after that, before the first period is chosen. All of these last a single step."""
_COLD_CACHE_FACTOR: Final = 4
"""Cost factor of a fingerprint taken alone once per step, instead of one after another with its code in the caches."""
_HALVE_BELOW: Final = 0.4
"""Share of the allowed cost below which the period is halved: half the period then suffices, with some margin."""


class FingerprintSchedule:
    """Assignment of tensors to reductions, so that fingerprints cost a thousandth of a step.

    Each rank decides alone, from measurements of how long all fingerprints and a step take. The period is a power of
    two, so ranks with different periods share the times of the longer one.

    Args:
        numbers: number of each tensor, from ``fingerprint_residue``.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.period = 1
        self._due: dict[int, tuple[int, ...]] = {}
        """Tensor indices by the number of reductions modulo the period."""
        self._cost_ns = 0.0
        self._passes = 0
        self._measured: list[tuple[int, float]] = []
        self._set_period(1)

    def list_due_tensors(self, first: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the reduction numbers at which something is due in a pass, in order, with the due tensors.

        For example, with the period 4, tensors with the numbers 5, 6 and 9 are due at reductions that are 1, 2 and 1
        modulo 4: ``list_due_tensors(10)`` is ``[(10, (1,)), (13, (0, 2))]``.

        Args:
            first: number of reductions at the start of the pass.
        """
        return sorted((first + (number - first) % self.period, indices) for number, indices in self._due.items())

    def update_period(self, cost_ns: int, step_ns: float) -> None:
        """Choose the next period from the cost of a pass.

        Args:
            cost_ns: time for all its fingerprints.
            step_ns: mean time from one reduction to the next, without fingerprints.
        """
        self._passes += 1
        if self._passes <= _WARM_UP_PASSES:
            return
        if self._passes <= _WARM_UP_PASSES + _MEASURED_PASSES:
            self._measured.append((cost_ns, step_ns))
            if self._passes < _WARM_UP_PASSES + _MEASURED_PASSES:
                return
            self._cost_ns = _COLD_CACHE_FACTOR * min(cost for cost, _ in self._measured)
            step_ns = sum(step for _, step in self._measured) / len(self._measured)
        else:
            self._cost_ns = (self._cost_ns + cost_ns) / 2
        allowed_ns = MAX_COST_SHARE * step_ns
        period = self.period
        while self._cost_ns > allowed_ns * period and period < MAX_PERIOD:
            period *= 2
        while period > 1 and self._cost_ns < _HALVE_BELOW * allowed_ns * period:
            period //= 2
        if period != self.period:
            self._set_period(period)

    def _set_period(self, period: int) -> None:
        self.period = period
        due: dict[int, list[int]] = {}
        for index, number in enumerate(self._numbers):
            due.setdefault(number % period, []).append(index)
        self._due = {number: tuple(indices) for number, indices in due.items()}


_DEVICE_NS_PER_BYTE: Final = 0.002
"""Assumed cost of reading on a device, while the host continues: half a terabyte per second."""
_MAX_UNCOLLECTED: Final = 1024
"""Maximum number of passes that have not been collected; the oldest are dropped."""


class FingerprintPass(NamedTuple):
    """A finished pass over all fingerprints, as in ``overlapscope.trace.live_files``."""

    period: int
    first: int
    steps: bytes
    values: bytes


class FingerprintedReplica:
    """Fingerprinted replica of one DDP instance.

    Args:
        tensors: parameters and buffers that have fingerprints, by name.
        device: device of the tensors.
        disable_recording: called after an internal error.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, Fingerprint]],
        device: torch.device,
        disable_recording: Callable[[Exception], None],
    ) -> None:
        self._disable_recording = disable_recording
        self._is_closed = False
        self._fingerprints = [fingerprint for _, fingerprint in tensors]
        self._bytes = sum(fingerprint.bytes for fingerprint in self._fingerprints)
        self._schedule = FingerprintSchedule([fingerprint_residue(name) for name, _ in tensors])
        self._rows = HostRows(len(tensors)) if device.type == "cpu" else DeviceRows(len(tensors), device)
        self._is_on_host = device.type == "cpu"
        self._current_reduction = -1
        self._taken_now: tuple[int, ...] = ()
        self._pass_end = self._next_due = 0
        self._due_tensors: deque[tuple[int, tuple[int, ...]]] = deque()
        self._pass_start = 0
        self._steps = array("I", bytes(4 * len(tensors)))
        self._began_ns = self._cost_ns = 0
        self._finished: deque[FingerprintPass] = deque(maxlen=_MAX_UNCOLLECTED)

    def disable_recording(self, error: Exception) -> None:
        """Stop taking fingerprints after an internal error."""
        self._is_closed = True
        self._disable_recording(error)

    def on_forward_start(self, reductions: int, step: int, finish_updates: Callable[[], None] = lambda: None) -> None:
        """Take the fingerprints that are due, when no update of the parameters is in progress.

        Called as a forward begins that will be reduced, or, if the forward makes updates, as it ends. Of several
        forwards after the same reduction the last one counts: its gradients are those that are reduced next, on all
        ranks, whatever one of them has run in between.

        Args:
            reductions: number of reductions so far.
            step: optimizer step.
            finish_updates: called before fingerprints are taken: waits until all parameters are up to date.
        """
        if not self._current_reduction < reductions < self._next_due and not self._is_closed:
            self._take_due_fingerprints(reductions, step, finish_updates)

    @never_raise
    def _take_due_fingerprints(self, reductions: int, step: int, finish_updates: Callable[[], None]) -> None:
        if reductions != self._current_reduction:
            if reductions >= self._pass_end or reductions < self._current_reduction:
                self._begin_pass(reductions)
            self._current_reduction = reductions
            while self._due_tensors and self._due_tensors[0][0] < reductions:  # for example after a while under join()
                self._due_tensors.popleft()
            is_due = self._due_tensors and self._due_tensors[0][0] == reductions
            self._taken_now = self._due_tensors.popleft()[1] if is_due else ()
            self._next_due = self._due_tensors[0][0] if self._due_tensors else self._pass_end
        if self._taken_now and self._can_take():
            finish_updates()
            began_ns = time.thread_time_ns()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._take(self._taken_now, step)
            self._cost_ns += time.thread_time_ns() - began_ns

    def close(self, reductions: int | None) -> None:
        """Hand over the unfinished pass, and a final fingerprint of all tensors.

        Args:
            reductions: number of reductions so far; None if it is no longer known, or an update is pending. What was
                taken since the last one is discarded: another forward might still have come.
        """
        if self._current_reduction < 0:
            return
        if reductions is None or reductions <= self._current_reduction:
            self._rows.discard(self._taken_now)
        self._finish_pass(self._pass_end - self._pass_start)
        self._current_reduction, self._pass_end = -1, 0
        if reductions is not None and not self._is_closed and self._can_take():
            self._rows.clear()
            self._pass_start = reductions
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._take(tuple(range(len(self._fingerprints))), 0)
            self._finish_pass(FINAL_PASS)
        self._is_closed = True

    def passes(self) -> list[FingerprintPass]:
        """Return the finished passes that were not collected yet. Called on another thread."""
        self._rows.collect(self._finished)
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found

    def _can_take(self) -> bool:
        """Return whether computations run now instead of being captured or dispatched elsewhere."""
        is_captured = not self._is_on_host and torch.cuda.is_current_stream_capturing()
        return not is_captured and not torch._C._len_torch_dispatch_stack()

    def _take(self, indices: tuple[int, ...], step: int) -> None:
        fingerprints, results, is_taken = self._fingerprints, self._rows.results, self._rows.is_taken
        for index in indices:
            self._steps[index] = step
            is_taken[index] = fingerprints[index].take(results[index])

    def _begin_pass(self, reductions: int) -> None:
        now_ns, began_ns = time.perf_counter_ns(), time.thread_time_ns()
        if self._current_reduction >= 0:
            self._finish_pass(self._pass_end - self._pass_start)
            passed = reductions - self._pass_start
            if passed > 0:
                device_ns = 0 if self._is_on_host else int(self._bytes * _DEVICE_NS_PER_BYTE)
                step_ns = (now_ns - self._began_ns - self._cost_ns) / passed
                self._schedule.update_period(self._cost_ns + device_ns, step_ns)
        self._rows.clear()
        self._pass_start, self._pass_end = reductions, reductions + self._schedule.period
        self._due_tensors = deque(self._schedule.list_due_tensors(reductions))
        self._began_ns, self._cost_ns = now_ns, time.thread_time_ns() - began_ns

    def _finish_pass(self, period: int) -> None:
        pass_ = FingerprintPass(period, self._pass_start, self._steps.tobytes(), b"")
        self._rows.finish_pass(pass_, self._finished)
