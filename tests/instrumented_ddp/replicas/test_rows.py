"""Fingerprints of a device are fetched when it has come so far, and nothing waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from instrumented_ddp.replicas.rows import DeviceRows, HostRows, TakenPass

TENSORS = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 64, 20_000, 5)]
PARTS = [range(3), range(3, 4)]
KERNEL_MS = 3.0


class Device:
    """A device whose work is over only as far as ``done`` says, by the number of its events."""

    def __init__(self) -> None:
        self.recorded = self.done = 0
        self.waits: list[int] = []


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.has_time, self.number = enable_timing, -1

        def record(self, _: object = None) -> None:
            self.number = made.recorded = made.recorded + 1

        def query(self) -> bool:
            assert self.number > 0
            return self.number <= made.done

        def elapsed_time(self, other: Event) -> float:
            assert self.has_time
            assert other.has_time
            assert other.query()  # otherwise it would wait
            return KERNEL_MS * (other.number - self.number)

    stream = SimpleNamespace(wait_event=lambda event: made.waits.append(event.number))
    with (
        patch("torch.cuda.Event", Event),
        patch("torch.cuda.current_stream", lambda _: stream),
        patch("torch.cuda.is_current_stream_capturing", lambda: False),
    ):
        yield made


def take_pass(rows: HostRows, finished: deque[TakenPass]) -> None:
    rows.begin_pass()
    for part in range(len(PARTS)):
        rows.take(part)
    rows.finish_pass(TakenPass(4, 8, np.array([5, 6], "<u4").tobytes(), b"", b""), finished)


def test_they_are_the_hosts_and_come_when_the_device_is_done(device: Device) -> None:
    finished: deque[TakenPass] = deque()
    host, rows = HostRows(TENSORS, PARTS), DeviceRows(TENSORS, PARTS)
    take_pass(host, finished)
    expected = host.decode(finished.pop())
    assert np.frombuffer(expected[2], "<u4").tolist() == [5, 5, 5, 6]
    take_pass(rows, finished)
    rows.collect(finished)
    assert not finished
    device.done = device.recorded
    rows.collect(finished)
    assert rows.decode(finished.pop()) == expected
    take_pass(rows, finished)
    assert device.waits == [device.done]  # the copy before, which still reads what is now written


def test_what_the_device_takes_is_measured_now_and_then(device: Device) -> None:
    rows, finished = DeviceRows(TENSORS, PARTS), deque[TakenPass]()
    events = []
    for _ in range(40):
        before = device.recorded
        take_pass(rows, finished)
        events.append(device.recorded - before)
        device.done = device.recorded
        rows.collect(finished)
    assert rows.device_ns == 2 * KERNEL_MS * 1e6
    measured = [number for number, count in enumerate(events) if count > 1]
    assert measured == [0, 1, 2, 3, 16, 32]


def test_a_device_that_lags_behind_loses_passes_and_nothing_waits(device: Device) -> None:
    rows, finished = DeviceRows(TENSORS, PARTS), deque[TakenPass]()
    for _ in range(100):
        take_pass(rows, finished)
    device.done = device.recorded
    rows.collect(finished)
    assert len(finished) == 64


def test_a_part_that_is_discarded_is_not_there() -> None:
    rows, finished = HostRows(TENSORS, PARTS), deque[TakenPass]()
    rows.begin_pass()
    rows.take(0)
    rows.take(1)
    rows.discard([0])
    rows.finish_pass(TakenPass(1, 0, bytes(8), b"", b""), finished)
    assert [value != 0 for value in np.frombuffer(rows.decode(finished.pop())[3], "<i8")] == [False] * 3 + [True]
