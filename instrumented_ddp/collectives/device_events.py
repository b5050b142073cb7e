"""Events without times on a CUDA device: whether it has come to a point, and streams that wait for each other.

``native.DeviceEvents`` records them through the device's driver, which spares the host the objects of torch: a current
stream as an object takes longer than an event on it. ``TorchEvents`` is its twin.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Protocol

import torch

from instrumented_ddp import native

_log = logging.getLogger(__name__)
_has_seen_a_capture = False

_CUDA_DRIVER: Final = "libcuda.so.1"
_HIP_RUNTIME: Final = "libamdhip64.so"


class Stream(Protocol):
    """A ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int:
        """Return its pointer."""


class DeviceEvent(Protocol):
    """An event that was recorded. It is used again when nobody refers to it."""

    def query(self) -> bool:
        """Return whether the device has passed it.

        Raises:
            RuntimeError: the device has failed.
        """


class DeviceEvents(Protocol):
    """Events without times on one device. They come from a pool, since creating one takes longer than recording it."""

    def record(self) -> DeviceEvent | None:
        """Record an event on the current stream; None if that is captured into a graph.

        Raises:
            RuntimeError: the device has failed.
        """

    def join(self, stream: torch.cuda.Stream, /) -> bool:
        """Make a stream wait for what the current stream was given so far.

        Returns:
            False, and nothing is done, if the current stream is captured into a graph, which the other would join.

        Raises:
            RuntimeError: the device has failed.
        """


class _TorchEvent:
    """An event of torch's that returns to its pool."""

    __slots__ = ("_event", "_pool")

    def __init__(self, event: torch.cuda.Event, pool: list[torch.cuda.Event]) -> None:
        self._event, self._pool = event, pool

    def query(self) -> bool:
        """Return whether the device has passed it."""
        return self._event.query()

    def __del__(self) -> None:
        self._pool.append(self._event)


class TorchEvents:
    """Events of torch's; see ``DeviceEvents``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []

    def record(self) -> DeviceEvent | None:
        """Record an event on the current stream; None if that is captured into a graph."""
        if is_capturing():
            return None
        event = self._pool.pop() if self._pool else torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _TorchEvent(event, self._pool)

    def join(self, stream: torch.cuda.Stream, /) -> bool:
        """Make a stream wait for the current one, unless that is captured."""
        if is_capturing():
            return False
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return True


def make_device_events(device: torch.device) -> DeviceEvents:
    """Return events of a CUDA device, through its driver if possible."""
    if native.IS_NATIVE:
        try:
            get_stream = torch._C._cuda_getCurrentRawStream
            return native.DeviceEvents(find_driver(), index_of(device), get_stream, warn_of_capture)
        except (AttributeError, OSError, RuntimeError) as error:
            _log.info("events on %s are recorded through torch, which costs more: %s", device, error)
    return TorchEvents(device)


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device, by default of the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def find_driver() -> str:
    """Return the driver's library: of CUDA by its name, of HIP by the path of the one that torch brings along.

    Raises:
        OSError: torch is built for HIP, and has not loaded it.
    """
    if torch.version.hip is None:
        return _CUDA_DRIVER
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(_HIP_RUNTIME):
            return path
    raise OSError(f"{_HIP_RUNTIME} is not loaded")


def is_capturing() -> bool:
    """Return whether the current stream is captured into a CUDA graph instead of being executed. Warns once."""
    if not torch.cuda.is_current_stream_capturing():
        return False
    warn_of_capture()
    return True


def warn_of_capture() -> None:
    """Warn once that a stream is captured into a CUDA graph instead of being executed."""
    global _has_seen_a_capture
    if not _has_seen_a_capture:
        _has_seen_a_capture = True
        _log.warning("a CUDA graph is being captured: what runs inside graphs is not recorded")
