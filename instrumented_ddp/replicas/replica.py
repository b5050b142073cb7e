"""This rank's replica of one model, fingerprinted a few tensors at a time as forwards begin."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from instrumented_ddp.recording.background import never_raise
from instrumented_ddp.replicas.rows import DeviceRows, HostRows, TakenPass
from instrumented_ddp.replicas.schedule import FingerprintSchedule
from overlapscope.trace.live_files import FINAL_PASS

_MAX_UNCOLLECTED: Final = 1024
"""Maximum number of passes that have not been collected; the oldest are dropped."""
_MAX_WALL_FACTOR: Final = 2
"""Of the time that passes meanwhile at most so many times the CPU time counts: the rest is the machine's doing."""
_PACE_INTERVALS: Final = 9
"""Number of intervals between two moments, the median of which is how long a step takes."""
_MAX_PACE_FACTOR: Final = 4
"""Factor by which steps become longer or shorter before a pass is cut short. What is longer by more is a pause."""


class _Stopwatch:
    """Adds up what fingerprints take the training thread."""

    def __init__(self) -> None:
        self.ns = 0
        self.start()

    def start(self) -> None:
        self._wall_ns, self._cpu_ns = time.perf_counter_ns(), time.thread_time_ns()

    def stop(self) -> None:
        cpu_ns, wall_ns = time.thread_time_ns() - self._cpu_ns, time.perf_counter_ns() - self._wall_ns
        self.ns += max(cpu_ns, min(wall_ns, _MAX_WALL_FACTOR * cpu_ns))


class FingerprintedReplica:
    """Fingerprinted replica of one DDP instance.

    They are computed on the current stream: a forward may change parameters (``Embedding(max_norm=...)`` does), so on
    another stream the result would depend on which is quicker.

    Args:
        tensors: parameters and buffers that have fingerprints.
        parts: the numbers of the tensors that are taken together, from ``divide_into_parts``.
        part_numbers: number of each part, as in ``FingerprintSchedule``.
        disable_recording: called after an internal error.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[range],
        part_numbers: Sequence[int],
        disable_recording: Callable[[Exception], None],
    ) -> None:
        self._disable_recording = disable_recording
        self._is_closed = False
        self._is_on_host = tensors[0].device.type == "cpu"
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        self._watched = [trained[0], trained[len(trained) // 2], trained[-1]] if trained else []
        """The first, the middle and the last trained parameter: if these have all been changed, all have."""
        self._accumulated: tuple[int, list[int]] = (-1, [])
        """Number of reductions at the latest forward under ``no_sync()``, and the versions of the watched tensors."""
        self._rows = HostRows(tensors, parts) if self._is_on_host else DeviceRows(tensors, parts)
        self._schedule = FingerprintSchedule(part_numbers)
        self.unreduced_updates = 0
        """Number of updates without a reduction before them; they count as moments, as reductions do."""
        self._current_reduction = -1
        self._taken_now: tuple[int, ...] = ()
        self._pass_start = self._pass_end = self._next_due = 0
        self._due: deque[tuple[int, tuple[int, ...]]] = deque()
        self._is_finished = True
        self._taken_parts = 0
        self._steps = array("I", bytes(4 * len(parts)))
        self._cost = _Stopwatch()
        self._ended_ns = 0
        """When fingerprints were last taken, or a pass began."""
        self._intervals_ns: deque[float] = deque(maxlen=_PACE_INTERVALS)
        """Latest times of a step, each the mean between two such moments."""
        self._step_ns = self._steps_ns = 0.0
        """Typical time of a step now; and of all steps of this pass together, without pauses such as evaluations."""
        self._planned_step_ns = 0.0
        """Typical time of a step when the period was chosen."""
        self._finished: deque[TakenPass] = deque(maxlen=_MAX_UNCOLLECTED)

    @property
    def period(self) -> int:
        """Return the number of reductions in which each tensor is taken once."""
        return self._schedule.period

    def disable_recording(self, error: Exception) -> None:
        """Stop taking fingerprints after an internal error."""
        self._is_closed = True
        self._disable_recording(error)

    def on_unreduced_update(self) -> None:
        """Note an update with gradients that were not reduced. From then on forwards that are not count as well."""
        self.unreduced_updates += 1

    def on_accumulating_forward(self, reductions: int) -> None:
        """Note that a forward under ``no_sync()`` begins: what is reduced later is computed with these parameters."""
        self._accumulated = reductions, [tensor._version for tensor in self._watched]

    def on_forward_start(self, reductions: int, step: int, finish_updates: Callable[[], None] = lambda: None) -> None:
        """Take the fingerprints that are due, when no update of the parameters is in progress.

        Called as a forward begins that will be reduced, or, if the forward makes updates, as it ends. Of several
        forwards after the same reduction the last one counts: its gradients are those that are reduced next, on all
        ranks, whatever one of them has run in between. None does if all parameters have changed since a forward whose
        gradients are added to its own: sharpness-aware loops move them by the gradients of each rank, and back.

        Args:
            reductions: number of reductions so far.
            step: optimizer step.
            finish_updates: called before fingerprints are taken: waits until all parameters are up to date.
        """
        reductions += self.unreduced_updates
        if not self._current_reduction < reductions < self._next_due and not self._is_closed:
            self._take_due_fingerprints(reductions, step, finish_updates)

    @never_raise
    def _take_due_fingerprints(self, reductions: int, step: int, finish_updates: Callable[[], None]) -> None:
        self._cost.start()
        if reductions != self._current_reduction:
            self._find_due(reductions)
        if self._taken_now and self._can_take() and not self._has_moved(reductions):
            self._cost.stop()
            finish_updates()
            self._cost.start()
            self._take(self._taken_now, step)
        self._cost.stop()
        self._ended_ns = time.perf_counter_ns()

    def _has_moved(self, reductions: int) -> bool:
        of_reductions, versions = self._accumulated
        pairs = zip(self._watched, versions, strict=False)
        return bool(versions) and of_reductions == reductions and all(one._version != before for one, before in pairs)

    def _find_due(self, reductions: int) -> None:
        passed = reductions - self._current_reduction
        if self._current_reduction >= 0 and passed > 0:
            interval_ns = (time.perf_counter_ns() - self._ended_ns) / passed
            self._intervals_ns.append(interval_ns)
            self._step_ns = sorted(self._intervals_ns)[(len(self._intervals_ns) - 1) // 2]
            self._steps_ns += passed * min(interval_ns, _MAX_PACE_FACTOR * self._step_ns)
        if reductions >= self._pass_end or passed < 0 or self._has_changed_pace():
            self._begin_pass(reductions)
        elif not self._due:  # what was taken is final now: no other forward comes after the same reduction
            self._finish_pass(self._pass_end - self._pass_start)
        self._current_reduction = reductions
        while self._due and self._due[0][0] < reductions:  # for example after a while under join()
            self._due.popleft()
        is_due = self._due and self._due[0][0] == reductions
        self._taken_now = self._due.popleft()[1] if is_due else ()
        self._taken_parts += len(self._taken_now)
        if self._due:
            self._next_due = self._due[0][0]
        else:
            self._next_due = self._pass_end if self._is_finished else reductions + 1

    def _has_changed_pace(self) -> bool:
        """Return whether steps have become so much longer or shorter that another period is better at once."""
        planned_ns = self._planned_step_ns
        return planned_ns > 0 and not 1 / _MAX_PACE_FACTOR < self._step_ns / planned_ns < _MAX_PACE_FACTOR

    def close(self, reductions: int | None) -> None:
        """Hand over the unfinished pass, and a final fingerprint of all tensors.

        Args:
            reductions: number of reductions so far; None if it is no longer known, or an update is pending. What was
                taken since the last one is discarded: another forward might still have come.
        """
        if self._current_reduction < 0:
            return
        if reductions is not None:
            reductions += self.unreduced_updates
        if reductions is None or reductions <= self._current_reduction:
            self._rows.discard(self._taken_now)
        self._finish_pass(self._pass_end - self._pass_start)
        self._current_reduction, self._pass_end = -1, 0
        if reductions is not None and not self._is_closed and self._can_take():
            self._rows.begin_pass()
            self._pass_start, self._is_finished = reductions, False
            self._take(range(len(self._steps)), 0)
            self._finish_pass(FINAL_PASS)
        self._is_closed = True

    def passes(self) -> list[tuple[int, int, bytes, bytes]]:
        """Return the finished passes that were not collected yet. Called on another thread.

        Returns:
            Period, first, steps and values of each, as in ``overlapscope.trace.live_files``.
        """
        self._rows.collect(self._finished)
        found = []
        while self._finished:
            found.append(self._rows.decode(self._finished.popleft()))
        return found

    def _can_take(self) -> bool:
        """Return whether computations run now instead of being captured or dispatched elsewhere."""
        is_captured = not self._is_on_host and torch.cuda.is_current_stream_capturing()
        return not is_captured and not torch._C._len_torch_dispatch_stack()

    def _take(self, parts: Sequence[int], step: int) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for part in parts:
                self._steps[part] = step
                self._rows.take(part)

    def _begin_pass(self, reductions: int) -> None:
        if self._current_reduction >= 0:
            self._finish_pass(self._pass_end - self._pass_start)
            if self._steps_ns > 0:
                taken_share = self._taken_parts / len(self._steps)
                # Either the host is what a step waits for, or the device.
                cost_ns = max(self._cost.ns, taken_share * self._rows.device_ns)
                self._schedule.end_pass(cost_ns, taken_share, self._steps_ns, self._step_ns)
                self._planned_step_ns = self._step_ns
                self._cost.ns = 0
        self._rows.begin_pass()
        self._pass_start, self._pass_end = reductions, reductions + self._schedule.period
        self._due = deque(self._schedule.list_due(reductions))
        self._is_finished = False
        self._taken_parts = 0
        self._steps_ns = 0.0

    def _finish_pass(self, period: int) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        pass_ = TakenPass(period, self._pass_start, self._steps.tobytes(), b"", b"")
        self._rows.finish_pass(pass_, self._finished)
