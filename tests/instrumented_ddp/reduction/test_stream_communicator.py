"""What is written of collectives on a device, against streams that exist only here.

A stream is the time at which all that it was given so far is done. Host time stands still: everything is enqueued at
once, as when the host is far ahead of its device. tests/gpu holds the same against a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp.recording.records import make_bitmap_records
from instrumented_ddp.reduction import communicator as communicators
from instrumented_ddp.reduction.communicator import StreamCommunicator
from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.sums import SumExecutor
from overlapscope.trace.schema import Flag

DEVICE = torch.device("cuda", 0)
TRANSFER = 10


class FakeStream:
    current: FakeStream

    def __init__(self, *_: object) -> None:
        self.done_at = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.done_at = max(self.done_at, other.done_at)


class FakeTimer:
    """Marks are the stream's time; None in a capture."""

    flags = Flag.DEVICE_CLOCK

    def __init__(self) -> None:
        self.is_capturing = False
        self.written: list[tuple[bytes, int, int]] = []

    def mark(self, stream: FakeStream | None = None) -> int | None:
        return None if self.is_capturing else (stream or FakeStream.current).done_at

    def write(self, body: bytes, _: int, start: int | None, end: int | None) -> None:
        if start is not None and end is not None:
            self.written.append((body, start, end))


class FakeSink:
    steps = SimpleNamespace(step=0)
    is_on = True
    collectives = None

    def __init__(self, timer: FakeTimer) -> None:
        self._timer = timer
        self.record_launch = lambda _: 0

    def get_timer(self, _: torch.device) -> FakeTimer:
        return self._timer


class FakeNcclBackend:
    """``ProcessGroupNCCL``."""


class FakeNccl2Backend:
    """``ProcessGroupNCCL2``: no subclass of it."""


class FakeNccl:
    """One collective after the other, on a stream of its own that waits for the one on which they are launched."""

    def __init__(self) -> None:
        self._stream = FakeStream()

    backend: Callable[[], object] = FakeNcclBackend

    def _get_backend(self, _: torch.device) -> object:
        return self.backend()

    def allreduce(self, *_: object) -> FakeWork:
        self._stream.wait_stream(FakeStream.current)
        self._stream.done_at += TRANSFER
        return FakeWork(self._stream.done_at)


class FakeNccl2(FakeNccl):
    """Its works would launch a kernel that spins, too, but a stream can wait for them by another method."""

    backend = FakeNccl2Backend

    def allreduce(self, *_: object) -> FakeWork:
        return FakeWork2(super().allreduce().end)


class FakeGloo(FakeNccl):
    """Its works would launch a kernel that spins."""

    backend = object


class FakeWork(dist.Work):
    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end

    def block_current_stream(self) -> None:
        FakeStream.current.done_at = max(FakeStream.current.done_at, self.end)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.block_current_stream()
        return True


class FakeWork2(FakeWork):
    def block_current_stream(self) -> None:
        pytest.fail("a kernel spins")

    def synchronize(self) -> None:
        super().block_current_stream()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.synchronize()
        return True


@pytest.fixture
def timer(monkeypatch) -> FakeTimer:
    @contextmanager
    def on(stream: FakeStream) -> Any:
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    monkeypatch.setattr(FakeStream, "current", FakeStream(), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    events = SimpleNamespace(join=lambda stream: stream.wait_stream(FakeStream.current))
    monkeypatch.setattr(communicators, "make_device_events", lambda _: events)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNcclBackend, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", FakeNccl2Backend, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCLLazy", type("Lazy", (), {}), raising=False)
    return FakeTimer()


RECORDS = make_bitmap_records(Flag.DEVICE_CLOCK, 0, 8, "float32")


def communicator(group: FakeNccl, timer: FakeTimer) -> Any:
    return StreamCommunicator(group, DEVICE, FakeSink(timer))  # type: ignore[arg-type]


needs_torch_28 = pytest.mark.skipif(
    not hasattr(dist.Work, "block_current_stream"), reason="needs torch 2.8: before, ends are seen by who waits"
)
either_nccl = pytest.mark.parametrize("kind", [pytest.param(FakeNccl, marks=needs_torch_28), FakeNccl2])


def compute(duration: int) -> None:
    FakeStream.current.done_at += duration


@either_nccl
def test_a_bucket_begins_when_it_is_ready_and_the_one_before_is_over(timer, kind):
    lane = communicator(kind(), timer)
    compute(3)
    first = lane.all_reduce(torch.ones(8), RECORDS)
    compute(2)  # the second is ready at 5, and waits until 13
    second = lane.all_reduce(torch.ones(8), RECORDS)
    for collective in (first, second):
        lane.wait(collective)
    assert timer.written == [(RECORDS.collective, 3, 13), (RECORDS.collective, 13, 23)]


@either_nccl
def test_so_does_a_bucket_of_stock_ddp_which_torchs_reducer_launches_from_the_stream_that_computes(timer, kind):
    group = kind()
    lane = communicator(group, timer)
    launched = []
    compute(3)
    for _ in range(2):
        collective = lane.announce(RECORDS)
        lane.launched(collective, group.allreduce([torch.ones(8)]))
        launched.append(collective)
        compute(2)
    assert FakeStream.current.done_at == 7, "what computes waits for none of them"
    for collective in launched:
        lane.waited(collective)
    assert timer.written == [(RECORDS.collective, 3, 13), (RECORDS.collective, 13, 23)]


def test_over_gloo_an_end_is_a_bound_marked_where_it_was_waited_for(timer, monkeypatch):
    monkeypatch.setattr(FakeWork, "block_current_stream", partial(pytest.fail, "a kernel spins"))
    monkeypatch.setattr(FakeWork, "wait", lambda work, _=None: setattr(FakeStream.current, "done_at", work.end))
    lane = communicator(FakeGloo(), timer)
    compute(3)
    collective = lane.all_reduce(torch.ones(8), RECORDS)
    lane.wait(collective)
    assert timer.written == [(RECORDS.collective_bounds, 3, 13)]


def test_over_gloo_a_bucket_of_stock_ddp_is_over_when_its_reducer_has_waited(timer, monkeypatch):
    monkeypatch.setattr(FakeWork, "block_current_stream", partial(pytest.fail, "a kernel spins"))
    group = FakeGloo()
    lane = communicator(group, timer)
    compute(3)
    collective = lane.announce(RECORDS)
    lane.launched(collective, group.allreduce([torch.ones(8)]))
    compute(20)
    lane.waited(collective)
    assert timer.written == [(RECORDS.collective_bounds, 3, 23)]


def test_what_is_captured_is_neither_marked_nor_waited_for_by_our_stream(timer, monkeypatch):
    lane = communicator(FakeNccl(), timer)
    timer.is_capturing = True
    monkeypatch.setattr(FakeWork, "block_current_stream", partial(pytest.fail, "our stream would join the graph"))
    monkeypatch.setattr(FakeWork, "wait", lambda *_: True)
    lane.wait(lane.all_reduce(torch.ones(8), RECORDS))
    assert timer.written == []


def test_no_work_outlives_the_wait_for_it(timer):
    lane = communicator(FakeNccl(), timer)
    collective = lane.all_reduce(torch.ones(8), RECORDS)
    lane.wait(collective)
    assert collective.work is None


class FakeFuture:
    def __init__(self, devices: object) -> None:
        """Of tensors on these."""

    def set_result(self, result: object) -> None:
        self.result = result


class FakeBucket:
    def index(self) -> int:
        return 0

    def buffer(self) -> Any:
        return SimpleNamespace(device=DEVICE)


class FakeGroup(FakeNccl):
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_each_part_of_a_sum_is_timed_on_the_stream_where_it_runs(timer, monkeypatch):
    """And not where the second one, which is launched later, is waited for."""
    monkeypatch.setattr(torch.futures, "Future", FakeFuture)

    def part(*_: object) -> None:
        compute(TRANSFER)

    sums = SumExecutor("in two parts", (part, part), FakeGroup())  # type: ignore[arg-type]
    lane = communicator(FakeGroup(), timer)
    compute(3)
    parts = []
    for number in range(2):
        told = BucketSumRecorder("in two parts", RECORDS, FakeSink(timer))  # type: ignore[arg-type]
        collective = lane.run_hook(partial(sums.launch, FakeBucket(), told, number), RECORDS)
        collective.start, collective.end = told.marks
        parts.append(collective)
        compute(30)  # the backward goes on
    lane.superseded(parts[0])
    lane.waited(parts[1])
    assert timer.written == [(RECORDS.collective, 3, 13), (RECORDS.collective, 33, 43)]
