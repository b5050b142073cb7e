"""This rank's replica of one model, fingerprinted a few tensors at a time as forwards begin."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from instrumented_ddp.recording.guard import survived
from instrumented_ddp.replicas.fingerprint import Fingerprint
from instrumented_ddp.replicas.rows import DeviceRows, HostRows
from instrumented_ddp.replicas.schedule import Schedule
from overlapscope.trace.sweep_file import AT_END, taken_at

_DEVICE_NS_PER_BYTE: Final = 0.002
"""Assumed cost of reading on a device, while the host continues: half a terabyte per second."""
_MOST_WAITING: Final = 1024
"""Maximum number of sweeps that have not been collected; the oldest are dropped."""


class Sweep(NamedTuple):
    """A finished pass over all fingerprints, as in ``overlapscope.trace.sweep_file``."""

    period: int
    first: int
    steps: bytes
    values: bytes


class Replica:
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
        gives_up: Callable[[Exception], None],
    ) -> None:
        self._gives_up = gives_up
        self._is_over = False
        self.is_at_rest: Callable[[], bool] = lambda: True
        """Returns whether no update is deferred or in flight."""
        self.come_to_rest: Callable[[], None] = lambda: None
        """Called before fingerprints are taken as a forward begins."""
        self._fingerprints = [fingerprint for _, fingerprint in tensors]
        self._bytes = sum(fingerprint.bytes for fingerprint in self._fingerprints)
        self._schedule = Schedule([taken_at(name) for name, _ in tensors])
        self._rows = HostRows(len(tensors)) if device.type == "cpu" else DeviceRows(len(tensors), device)
        self._is_on_host = device.type == "cpu"
        self._now = -1
        self._taken_now: tuple[int, ...] = ()
        self._end = self._next = 0
        self._agenda: deque[tuple[int, tuple[int, ...]]] = deque()
        self._first = 0
        self._steps = array("I", bytes(4 * len(tensors)))
        self._began_ns = self._cost_ns = 0
        self._over: deque[Sweep] = deque(maxlen=_MOST_WAITING)

    def gives_up(self, error: Exception) -> None:
        """Stop taking fingerprints after an internal error."""
        self._is_over = True
        self._gives_up(error)

    def forward_begins(self, reductions: int, step: int) -> None:
        """Take the fingerprints that are due, when no update of the parameters is in progress.

        Called as a forward begins that will be reduced, or, if the forward makes updates, as it ends. Of several
        forwards after the same reduction the last one counts: its gradients are those that are reduced next, on all
        ranks, whatever one of them has run in between.

        Args:
            reductions: number of reductions so far.
            step: optimizer step.
        """
        if not self._now < reductions < self._next and not self._is_over:
            self._take_what_is_due(reductions, step)

    @survived
    def _take_what_is_due(self, reductions: int, step: int) -> None:
        if reductions != self._now:
            if reductions >= self._end or reductions < self._now:
                self._sweep_begins(reductions)
            self._now = reductions
            while self._agenda and self._agenda[0][0] < reductions:  # for example after a while under join()
                self._agenda.popleft()
            is_due = self._agenda and self._agenda[0][0] == reductions
            self._taken_now = self._agenda.popleft()[1] if is_due else ()
            self._next = self._agenda[0][0] if self._agenda else self._end
        if self._taken_now and self._can_take():
            self.come_to_rest()
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
        if self._now < 0:
            return
        if not self.is_at_rest():
            reductions = None
        if reductions is None or reductions <= self._now:
            self._rows.forget(self._taken_now)
        self._hand_over(self._end - self._first)
        self._now, self._end = -1, 0
        if reductions is not None and not self._is_over and self._can_take():
            self._rows.clear()
            self._first = reductions
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._take(tuple(range(len(self._fingerprints))), 0)
            self._hand_over(AT_END)
        self._is_over = True

    def sweeps(self) -> list[Sweep]:
        """Return the finished sweeps that were not collected yet. Called on another thread."""
        self._rows.collect(self._over)
        found = []
        while self._over:
            found.append(self._over.popleft())
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

    def _sweep_begins(self, reductions: int) -> None:
        now_ns, began_ns = time.perf_counter_ns(), time.thread_time_ns()
        if self._now >= 0:
            self._hand_over(self._end - self._first)
            passed = reductions - self._first
            if passed > 0:
                device_ns = 0 if self._is_on_host else int(self._bytes * _DEVICE_NS_PER_BYTE)
                step_ns = (now_ns - self._began_ns - self._cost_ns) / passed
                self._schedule.sweep_is_over(self._cost_ns + device_ns, step_ns)
        self._rows.clear()
        self._first, self._end = reductions, reductions + self._schedule.period
        self._agenda = deque(self._schedule.agenda(reductions))
        self._began_ns, self._cost_ns = now_ns, time.thread_time_ns() - began_ns

    def _hand_over(self, period: int) -> None:
        sweep = Sweep(period, self._first, self._steps.tobytes(), b"")
        self._rows.hand_over(sweep, self._over)
