"""Buffers in which a sweep's fingerprints are computed and passed to the housekeeper without blocking."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_ROWS: Final = 64
"""Maximum number of sweeps in transfer from a device; a sweep that finds all rows in use is discarded."""
_ZERO_MASK: Final = -0x0123456789ABCDEF
"""XORed with each fingerprint: 0, the fingerprint of zeros, is stored for one that was not taken."""


class HostRows:
    """Fingerprints computed on the host, where results are available at once.

    Args:
        tensors: number of tensors.
    """

    def __init__(self, tensors: int) -> None:
        self._row = torch.zeros(tensors, dtype=torch.int64)
        self.results = list(self._row.unbind())
        self.is_taken = bytearray(tensors)

    def clear(self) -> None:
        """Begin a sweep."""
        self.is_taken[:] = bytes(len(self.is_taken))

    def discard(self, indices: tuple[int, ...]) -> None:
        """Discard the fingerprints of some tensors."""
        for index in indices:
            self.is_taken[index] = False

    def finish_pass(self, sweep: Any, finished: deque[Any]) -> None:
        """Finish a sweep."""
        if any(self.is_taken):
            finished.append(sweep._replace(values=_values(self._row.numpy(), bytes(self.is_taken))))

    def collect(self, finished: deque[Any]) -> None:
        """Do nothing: finished sweeps are available at once."""


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
        """Begin a sweep after the copy of the previous one: the current stream may be another one now."""
        super().clear()
        if self._in_transfer and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device_row.device).wait_event(self._in_transfer[-1][1])

    def finish_pass(self, sweep: Any, finished: deque[Any]) -> None:  # noqa: ARG002 - it is not available yet
        """Enqueue the copy to the host."""
        if not any(self.is_taken) or not self._free or torch.cuda.is_current_stream_capturing():
            return
        number = self._free.popleft()
        self._host_rows[number].copy_(self._device_row, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device_row.device))
        self._in_transfer.append((number, event, bytes(self.is_taken), sweep))

    def collect(self, finished: deque[Any]) -> None:
        """Collect the sweeps that have arrived. Called on another thread."""
        while self._in_transfer and self._in_transfer[0][1].query():
            number, _, is_taken, sweep = self._in_transfer[0]
            finished.append(sweep._replace(values=_values(self._host_rows[number].numpy(), is_taken)))
            self._in_transfer.popleft()
            self._free.append(number)


def _values(row: npt.NDArray[np.int64], is_taken: bytes) -> bytes:
    """Return the fingerprints as they are stored, 0 for those that were not taken."""
    return np.where(np.frombuffer(is_taken, dtype=bool), row ^ _ZERO_MASK, 0).astype("<i8").tobytes()
