"""Where the fingerprints of a pass go, on the host or a device, and what computing them costs the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from instrumented_ddp.replicas.fingerprint import TensorPart

_ROWS: Final = 64
"""Maximum number of passes in transfer from a device; a pass that finds all rows in use is discarded."""
_ZERO_MASK: Final = -0x0123456789ABCDEF
"""XORed with each fingerprint: 0, the fingerprint of zeros, is stored for one that was not taken."""
_FIRST_MEASURED_PASSES: Final = 4
_MEASURED_PASS_INTERVAL: Final = 16
"""Of the passes after the first ones, one in so many is measured on the device: each event takes 2 us of it."""
_ASSUMED_NS_PER_BYTE: Final = 0.002
"""Cost of reading on a device until it is measured: half a terabyte per second."""


class TakenPass(NamedTuple):
    """A finished pass, as in ``overlapscope.trace.live_files`` except for its steps and values."""

    period: int
    first: int
    steps: bytes
    """Of each part, ``uint32``."""
    results: bytes
    """Results in the order of the parts, ``int64``."""
    is_taken: bytes
    """A byte for each result: 1 if it is there."""


class HostRows:
    """Fingerprints of a pass, computed on the host, where results are available at once.

    Args:
        tensors: all tensors, in order.
        parts: the numbers of the tensors of each part.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], parts: Sequence[range]) -> None:
        self._row = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
        self.parts = [
            TensorPart([tensors[number] for number in part], part, self._row[part.start : part.stop]) for part in parts
        ]
        self._spans = parts
        self._sizes = [len(part) for part in parts]
        self._order = np.array([number for part in self.parts for number in part.order])
        self._running_sums = np.flatnonzero([one for part in self.parts for one in part.is_running_sum])
        self._is_taken = bytearray(len(tensors))
        self.device_ns = 0.0
        """What a pass takes the device, beside the host."""

    def begin_pass(self) -> None:
        """Forget the pass before."""
        self._is_taken[:] = bytes(len(self._is_taken))

    def take(self, part: int) -> None:
        """Compute the fingerprints of a part."""
        span = self._spans[part]
        self._is_taken[span.start : span.stop] = self.parts[part].take()

    def discard(self, parts: Sequence[int]) -> None:
        """Discard the fingerprints of some parts."""
        for part in parts:
            span = self._spans[part]
            self._is_taken[span.start : span.stop] = bytes(len(span))

    def finish_pass(self, pass_: TakenPass, finished: deque[TakenPass]) -> None:
        """Finish a pass, if anything was taken."""
        if any(self._is_taken):
            finished.append(pass_._replace(results=self._row.numpy().tobytes(), is_taken=bytes(self._is_taken)))

    def collect(self, finished: deque[TakenPass]) -> None:
        """Do nothing: finished passes are available at once."""

    def decode(self, taken: TakenPass) -> tuple[int, int, bytes, bytes]:
        """Return period, first, steps and values of a pass as they are stored, in the order of the tensors."""
        results = np.frombuffer(taken.results, dtype=np.int64)
        fingerprints: npt.NDArray[np.int64] = results.copy()
        fingerprints[self._running_sums] -= results[self._running_sums - 1]
        stored = np.where(np.frombuffer(taken.is_taken, dtype=bool), fingerprints ^ _ZERO_MASK, 0)
        values = np.empty(len(stored), "<i8")
        values[self._order] = stored
        steps = np.repeat(np.frombuffer(taken.steps, dtype="<u4"), self._sizes)
        return taken.period, taken.first, steps.tobytes(), values.tobytes()


class DeviceRows(HostRows):
    """Fingerprints computed on a CUDA device, collected once the device has finished without waiting for it."""

    def __init__(self, tensors: Sequence[torch.Tensor], parts: Sequence[range]) -> None:
        super().__init__(tensors, parts)
        self._device = self._row.device
        self._host_rows = torch.zeros((_ROWS, len(tensors)), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._free = deque(range(_ROWS))
        self._in_transfer: deque[tuple[int, torch.cuda.Event, TakenPass]] = deque()
        self._copied: torch.cuda.Event | None = None
        self._passes = 0
        self._is_measured = False
        self._measured: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.device_ns = _ASSUMED_NS_PER_BYTE * sum(part.bytes for part in self.parts)

    def begin_pass(self) -> None:
        """Begin a pass after the copy of the previous one: the current stream may be another one now."""
        super().begin_pass()
        if self._copied is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._read_events()
        self._is_measured = self._passes < _FIRST_MEASURED_PASSES or self._passes % _MEASURED_PASS_INTERVAL == 0
        self._passes += 1

    def _read_events(self) -> None:
        over = [begin.elapsed_time(end) for begin, end in self._measured if end.query()]
        if over:
            self.device_ns = 1e6 * sum(over) / len(over) * len(self.parts)
        self._measured.clear()

    def take(self, part: int) -> None:
        """Compute the fingerprints of a part, in some passes between two events."""
        if not self._is_measured:
            super().take(part)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        super().take(part)
        end.record()
        self._measured.append((begin, end))

    def finish_pass(self, pass_: TakenPass, finished: deque[TakenPass]) -> None:  # noqa: ARG002 - not available yet
        """Enqueue the copy to the host."""
        if not any(self._is_taken) or not self._free or torch.cuda.is_current_stream_capturing():
            return
        number = self._free.popleft()
        self._host_rows[number].copy_(self._row, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))
        self._in_transfer.append((number, self._copied, pass_._replace(is_taken=bytes(self._is_taken))))

    def collect(self, finished: deque[TakenPass]) -> None:
        """Collect the passes that have arrived. Called on another thread."""
        while self._in_transfer and self._in_transfer[0][1].query():
            number, _, taken = self._in_transfer.popleft()
            finished.append(taken._replace(results=self._host_rows[number].numpy().tobytes()))
            self._free.append(number)
