"""This rank's replica of one model, fingerprinted a few tensors at a time as forwards begin."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from instrumented_ddp.recording.guard import never_raise
from instrumented_ddp.replicas.fingerprint import Fingerprint
from instrumented_ddp.replicas.rows import DeviceRows, HostRows
from instrumented_ddp.replicas.schedule import FingerprintSchedule
from overlapscope.trace.sweep_file import FINAL_PASS, fingerprint_residue

_DEVICE_NS_PER_BYTE: Final = 0.002
"""Assumed cost of reading on a device, while the host continues: half a terabyte per second."""
_MAX_UNCOLLECTED: Final = 1024
"""Maximum number of sweeps that have not been collected; the oldest are dropped."""


class FingerprintPass(NamedTuple):
    """A finished pass over all fingerprints, as in ``overlapscope.trace.sweep_file``."""

    period: int
    first: int
    steps: bytes
    values: bytes


class FingerprintedReplica:
    """Fingerprinted replica of one DDP instance.

    Args:
        tensors: parameters and buffers that have fingerprints, by name.
        device: device of the tensors.
        gives_up: called after an internal error.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, Fingerprint]],
        device: torch.device,
        disable_recording: Callable[[Exception], None],
    ) -> None:
        self._disable_recording = disable_recording
        self._is_closed = False
        self.has_no_pending_update: Callable[[], bool] = lambda: True
        """Returns whether no update is deferred or in flight."""
        self.complete_updates: Callable[[], None] = lambda: None
        """Called before fingerprints are taken as a forward begins."""
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

    def on_forward_start(self, reductions: int, step: int) -> None:
        """Take the fingerprints that are due, when no update of the parameters is in progress.

        Called as a forward begins that will be reduced, or, if the forward makes updates, as it ends. Of several
        forwards after the same reduction the last one counts: its gradients are those that are reduced next, on all
        ranks, whatever one of them has run in between.

        Args:
            reductions: number of reductions so far.
            step: optimizer step.
        """
        if not self._current_reduction < reductions < self._next_due and not self._is_closed:
            self._take_due_fingerprints(reductions, step)

    @never_raise
    def _take_due_fingerprints(self, reductions: int, step: int) -> None:
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
            self.complete_updates()
            began_ns = time.thread_time_ns()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._take(self._taken_now, step)
            self._cost_ns += time.thread_time_ns() - began_ns

    def close(self, reductions: int | None) -> None:
        """Hand over the unfinished sweep, and a final fingerprint of all tensors.

        Args:
            reductions: number of reductions so far, None if no longer known. What was taken since the last one is
                discarded: another forward might still have come.
        """
        if self._current_reduction < 0:
            return
        if not self.has_no_pending_update():
            reductions = None
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

    def sweeps(self) -> list[FingerprintPass]:
        """Return the finished sweeps that were not collected yet. Called on another thread."""
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
        sweep = FingerprintPass(period, self._pass_start, self._steps.tobytes(), b"")
        self._rows.finish_pass(sweep, self._finished)
