"""Contract of ``_native.c``: that of the twins in Python."""

from collections.abc import Callable

from instrumented_ddp.collectives.device_events import DeviceEvent, Stream
from instrumented_ddp.native.countdown import Countdown as Countdown
from instrumented_ddp.native.finite import FiniteProbe as FiniteProbe
from instrumented_ddp.recording.timing import Mark
from overlapscope.trace.collective_log import EntryStore as EntryStore
from overlapscope.trace.event_log import RecordStore as RecordStore
from overlapscope.trace.schema import Flag

INTERFACE: int

class EventTimer:
    """Timer of work on a device by events of its driver, the twin of ``CudaTimer``.

    A thread that never takes the interpreter lock times them and writes records, a few times per step at most.

    Args:
        store: receives the records.
        driver: path or name of the driver's library, of CUDA or HIP.
        device_index: index of the device, as torch counts.
        anchor_stream: pointer of a stream that nothing else uses; it has to outlive the timer.
        current_stream: returns the pointer of the device's current stream.
        on_capture: called when nothing is marked because the stream is captured.
        on_failure: called once with the driver's error after which nothing is marked.
        flags: value of the attribute of this name.

    Raises:
        OSError: the library can't be loaded, or lacks a function.
        RuntimeError: the device has failed.
    """

    flags: Flag

    def __init__(
        self,
        store: RecordStore,
        driver: str,
        device_index: int,
        anchor_stream: int,
        current_stream: Callable[[int], int],
        on_capture: Callable[[], object],
        on_failure: Callable[[str], object],
        flags: Flag,
    ) -> None: ...
    def mark(self, stream: Stream | None = None, /) -> Mark: ...
    def write(self, body: bytes, step: int, start: Mark, end: Mark, /) -> None: ...
    def on_step_start(self) -> None: ...
    def start(self) -> None:
        """Start the thread."""

    def poll(self) -> None:
        """Do once what the thread does periodically."""

    def close(self) -> None: ...

class DeviceEvents:
    """Events without times on a device, the twin of ``TorchEvents``.

    Args:
        driver: as for ``EventTimer``.
        device_index: as for ``EventTimer``.
        current_stream: as for ``EventTimer``.
        on_capture: as for ``EventTimer``.

    Raises:
        OSError: the library can't be loaded, or lacks a function.
        RuntimeError: the device has failed.
    """

    def __init__(
        self,
        driver: str,
        device_index: int,
        current_stream: Callable[[int], int],
        on_capture: Callable[[], object],
    ) -> None: ...
    def record(self) -> DeviceEvent | None: ...
    def join(self, stream: Stream, /) -> bool: ...
