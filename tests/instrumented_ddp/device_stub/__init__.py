"""A CUDA device that exists only here: the driver is ``stub.c``, and torch's part of it a few lines of Python.

A test moves the host's clock and gives streams work; the times, the order and the errors that follow are exact.
tests/gpu holds the same against real devices.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch

DEVICE: Final = torch.device("cuda", 0)
OTHER_DEVICE: Final = torch.device("cuda", 1)
ASSERT: Final = 710
"""``CUDA_ERROR_ASSERT``, after which every call fails."""
GLOBAL: Final = 0
"""``CU_STREAM_CAPTURE_MODE_GLOBAL``."""
_NOT_READY: Final = 600
_COUNTS: Final = ("created", "alive", "recorded", "queries", "violations", "retained", "depth")


def compile_stub(folder: Path, *flags: str) -> Path:
    """Compile the driver, or skip the test."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler, and the stub of the driver is in C")
    path = folder / "libstub.so"
    source = Path(__file__).with_name("stub.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *flags, "-o", path, source, "-lpthread"], check=True)
    return path


class StubStream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, stub: Stub, device: torch.device, pointer: int | None = None) -> None:
        self._stub = stub
        self.device = device
        self.cuda_stream: int = stub.call("stub_stream", device.index) if pointer is None else pointer

    def wait_stream(self, other: StubStream) -> None:
        """Wait for what the other was given so far."""
        event = StubEvent()
        event.record(other)
        event.hold(self)

    def enqueue(self, duration_ns: int) -> None:
        """Work for some time."""
        self._stub.call("stub_enqueue", self.cuda_stream, duration_ns)

    @property
    def done_ns(self) -> int:
        """Time at which all that it was given is done."""
        return int(self._stub.call("stub_done_ns", self.cuda_stream))


class StubEvent:
    """Stands for ``torch.cuda.Event``, on the same driver. Like that, it is made when it is first recorded."""

    stub: Stub

    def __init__(self, enable_timing: bool = False) -> None:
        self._flags = 0 if enable_timing else 2
        self._event: ctypes.c_void_p | None = None
        self._device = 0

    def record(self, stream: StubStream) -> None:
        self._device = stream.device.index
        if self._event is None:
            self._event = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(self._event), self._flags)
        self._call("cuEventRecord", self._event, stream.cuda_stream)

    def hold(self, stream: StubStream) -> None:
        """Let a stream wait for it."""
        self._call("cuStreamWaitEvent", stream.cuda_stream, self._event, 0)

    def query(self) -> bool:
        return self._call("cuEventQuery", self._event) != _NOT_READY

    def synchronize(self) -> None:
        self._call("cuEventSynchronize", self._event)

    def elapsed_time(self, end: StubEvent) -> float:
        ms = ctypes.c_float()
        if self._call("cuEventElapsedTime", ctypes.byref(ms), self._event, end._event):
            raise RuntimeError("CUDA error: device not ready")
        return ms.value

    def _call(self, name: str, *arguments: Any) -> int:
        """Call the driver as torch does, on the event's device, and raise what is an error."""
        self.stub.call("stub_enter", self._device)
        code = int(self.stub.call(name, *arguments))
        self.stub.call("stub_leave")
        if code not in (0, _NOT_READY):
            raise RuntimeError(f"CUDA error: {'CUDA_ERROR_ASSERT' if code == ASSERT else code}\nCompile with more")
        return code


class Stub:
    """The driver, and the host's clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name in ("stubHostNowNs", "stub_done_ns", "stub_count"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.stub_stream.restype = ctypes.c_void_p
        self.call("stub_reset")
        self.default = self.current = StubStream(self, DEVICE, 0)
        self.default_of_other = StubStream(self, OTHER_DEVICE, 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library; integers are 64 bits wide, as pointers and times are."""
        wide = [ctypes.c_int64(each) if isinstance(each, int) else each for each in arguments]
        return getattr(self._library, name)(*wide)

    @property
    def host_ns(self) -> int:
        """The host's clock."""
        return int(self.call("stubHostNowNs"))

    def advance(self, duration_ns: int) -> None:
        """Let time pass on the host, and on the device."""
        self.call("stub_advance", duration_ns)

    def fail(self, code: int = ASSERT) -> None:
        """From now on every call fails."""
        self.call("stub_fail", code)

    def count(self, what: str) -> int:
        """How many events were created, are alive, were recorded; queries; violations of CUDA's rules; and so on."""
        return int(self.call("stub_count", _COUNTS.index(what)))

    @contextmanager
    def capturing(self, stream: StubStream | None = None, mode: int = GLOBAL) -> Iterator[None]:
        """Capture a stream, by default the current one, into a graph."""
        self.call("stub_begin_capture", (stream or self.current).cuda_stream, mode)
        yield
        self.call("stub_end_capture")

    def is_capturing(self) -> bool:
        """Whether the current stream is captured."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", self.current.cuda_stream, ctypes.byref(status))
        return bool(status.value)

    def current_of(self, device: torch.device | int) -> StubStream:
        """The current stream of a device."""
        index = device if isinstance(device, int) else device.index
        return self.default_of_other if index == OTHER_DEVICE.index else self.current

    @contextmanager
    def on(self, stream: StubStream) -> Iterator[None]:
        """Make a stream current."""
        before, self.current = self.current, stream
        yield
        self.current = before


def play_torch(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stub in the place of torch's functions for CUDA, and its clock in that of the host's."""
    stub.call("stub_enter", 0)
    monkeypatch.setattr(StubEvent, "stub", stub, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", StubEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: StubStream(stub, device))
    monkeypatch.setattr(torch.cuda, "current_stream", stub.current_of)
    monkeypatch.setattr(torch.cuda, "stream", stub.on)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", stub.is_capturing)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: stub.current_of(index).cuda_stream, raising=False
    )
    monkeypatch.setattr("instrumented_ddp.recording.timing.host_now_ns", lambda: stub.host_ns)
    for module in ("recording.timing", "collectives.device_events", "collectives.device_completion"):
        monkeypatch.setattr(f"instrumented_ddp.{module}.find_driver", lambda: str(stub.path))
