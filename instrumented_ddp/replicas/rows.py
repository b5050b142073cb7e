"""Where the fingerprints of a sweep are computed, and how they come to the housekeeper without anybody waiting."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_ROWS: Final = 64
"""Sweeps that may be on their way from a device. What comes when all are is not kept."""
_NOT_ZERO: Final = -0x0123456789ABCDEF
"""A fingerprint may be 0, as that of zeros is, which stands for one that was not taken: so it is changed by this."""


class HostRows:
    """On the host results are there at once.

    Args:
        tensors: how many.
    """

    def __init__(self, tensors: int) -> None:
        self._row = torch.zeros(tensors, dtype=torch.int64)
        self.results = list(self._row.unbind())
        self.is_taken = bytearray(tensors)

    def clear(self) -> None:
        """A sweep begins."""
        self.is_taken[:] = bytes(len(self.is_taken))

    def forget(self, indices: tuple[int, ...]) -> None:
        """These were not taken after all."""
        for index in indices:
            self.is_taken[index] = False

    def hand_over(self, sweep: Any, over: deque[Any]) -> None:
        """A sweep is over."""
        if any(self.is_taken):
            over.append(sweep._replace(values=_values(self._row.numpy(), bytes(self.is_taken))))

    def collect(self, over: deque[Any]) -> None:
        """Called on another thread."""


class DeviceRows(HostRows):
    """On a CUDA device they come when the device has got so far; nobody waits for that.

    Args:
        tensors: how many.
        device: where they are computed.
    """

    def __init__(self, tensors: int, device: torch.device) -> None:
        self.is_taken = bytearray(tensors)
        self._device_row = torch.zeros(tensors, dtype=torch.int64, device=device)
        self.results = list(self._device_row.unbind())
        self._host_rows = torch.zeros((_ROWS, tensors), dtype=torch.int64, pin_memory=True)
        self._free = deque(range(_ROWS))
        self._coming: deque[tuple[int, torch.cuda.Event, bytes, Any]] = deque()

    def clear(self) -> None:
        """A sweep begins, behind the copy of the one before: the stream may be another one now."""
        super().clear()
        if self._coming and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device_row.device).wait_event(self._coming[-1][1])

    def hand_over(self, sweep: Any, over: deque[Any]) -> None:  # noqa: ARG002 - it is not there yet
        """Have it copied to the host, behind what the device is at."""
        if not any(self.is_taken) or not self._free or torch.cuda.is_current_stream_capturing():
            return
        number = self._free.popleft()
        self._host_rows[number].copy_(self._device_row, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device_row.device))
        self._coming.append((number, event, bytes(self.is_taken), sweep))

    def collect(self, over: deque[Any]) -> None:
        """Take what has arrived. Called on another thread."""
        while self._coming and self._coming[0][1].query():
            number, _, is_taken, sweep = self._coming[0]
            over.append(sweep._replace(values=_values(self._host_rows[number].numpy(), is_taken)))
            self._coming.popleft()
            self._free.append(number)


def _values(row: npt.NDArray[np.int64], is_taken: bytes) -> bytes:
    """Fingerprints as they are stored, 0 for those that were not taken."""
    return np.where(np.frombuffer(is_taken, dtype=bool), row ^ _NOT_ZERO, 0).astype("<i8").tobytes()
