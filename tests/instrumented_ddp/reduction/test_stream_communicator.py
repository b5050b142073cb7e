"""What is written of collectives on a device, by streams and events of the stub of its driver.

Host time stands still until all is enqueued, as when the host is far ahead of its device. tests/gpu holds the same
against a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import native
from instrumented_ddp.recording.records import make_bitmap_records
from instrumented_ddp.recording.timing import DeviceTimer, make_timer
from instrumented_ddp.reduction.communicator import StreamCommunicator
from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.sums import SumExecutor
from overlapscope.trace.event_log import EventLogWriter, read_log
from overlapscope.trace.schema import Flag
from tests.instrumented_ddp.device_stub import DEVICE, Stub, StubStream

US = 1_000
TRANSFER_US = 10
needs_native = pytest.mark.skipif(not native.IS_NATIVE, reason="the code in C could not be compiled here")


class FakeSink:
    steps = SimpleNamespace(step=0)
    collectives = None
    is_on = True

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self.record_launch = lambda _: 0

    def get_timer(self, _: torch.device) -> DeviceTimer:
        return self._timer


class Device:
    """A device, the records of its timer, and what a rank does on it."""

    def __init__(self, stub: Stub, folder: Path) -> None:
        self.stub = stub
        self.log = EventLogWriter(folder / "events.log", make_store=native.RecordStore)
        self.timer = make_timer(DEVICE, self.log)
        self.sink = FakeSink(self.timer)
        self.begin_ns = stub.host_ns

    def compute(self, duration_us: int) -> None:
        self.stub.current.enqueue(duration_us * US)

    def communicator(self, group: FakeNccl) -> Any:
        return StreamCommunicator(group, DEVICE, self.sink)  # type: ignore[arg-type]

    def written(self) -> list[tuple[bytes, int, int]]:
        """Body, start and end in microseconds of each record, once the device has done all its work."""
        self.stub.advance(1_000_000 * US)
        self.timer.on_step_start()
        self.timer.close()
        self.log.close()
        _, records, _ = read_log(self.log.path)
        return [
            (row.tobytes()[28:56], *(round((int(row[name]) - self.begin_ns) / US) for name in ("start_ns", "end_ns")))
            for row in records
        ]


class FakeNcclBackend:
    """``ProcessGroupNCCL``."""


class FakeNccl2Backend:
    """``ProcessGroupNCCL2``: no subclass of it."""


class FakeNccl:
    """One collective after the other, on a stream of its own that waits for the one on which they are launched."""

    backend: Callable[[], object] = FakeNcclBackend

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self._stream = StubStream(stub, DEVICE)

    def _get_backend(self, _: torch.device) -> object:
        return self.backend()

    def allreduce(self, *_: object) -> FakeWork:
        self._stream.wait_stream(self.stub.current)
        self._stream.enqueue(TRANSFER_US * US)
        return FakeWork(self)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class FakeNccl2(FakeNccl):
    """Its works would launch a kernel that spins, too, but a stream can wait for them by another method."""

    backend = FakeNccl2Backend

    def allreduce(self, *_: object) -> FakeWork:
        super().allreduce()
        return FakeWork2(self)


class FakeGloo(FakeNccl):
    """Its works would launch a kernel that spins."""

    backend = object


class FakeWork(dist.Work):
    def __init__(self, group: FakeNccl) -> None:
        super().__init__()
        self._stub = group.stub
        self._end = StubStream(group.stub, DEVICE)
        self._end.wait_stream(group._stream)

    def block_current_stream(self) -> None:
        self._stub.current.wait_stream(self._end)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._stub.current.wait_stream(self._end)
        return True


class FakeWork2(FakeWork):
    def block_current_stream(self) -> None:
        pytest.fail("a kernel spins")

    def synchronize(self) -> None:
        super().block_current_stream()


@pytest.fixture(params=[pytest.param(True, marks=needs_native, id="C"), pytest.param(False, id="Python")])
def device(
    request: pytest.FixtureRequest, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    monkeypatch.setattr(native, "IS_NATIVE", request.param)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNcclBackend, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", FakeNccl2Backend, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCLLazy", type("Lazy", (), {}), raising=False)
    device = Device(stub, tmp_path)
    yield device
    device.timer.close()
    assert stub.count("violations") == 0


RECORDS = make_bitmap_records(Flag.DEVICE_CLOCK, 0, 8, "float32")


needs_torch_28 = pytest.mark.skipif(
    not hasattr(dist.Work, "block_current_stream"), reason="needs torch 2.8: before, ends are seen by who waits"
)
either_nccl = pytest.mark.parametrize("kind", [pytest.param(FakeNccl, marks=needs_torch_28), FakeNccl2])


@either_nccl
def test_a_bucket_begins_when_it_is_ready_and_the_one_before_is_over(device, kind):
    lane = device.communicator(kind(device.stub))
    device.compute(3)
    first = lane.all_reduce(torch.ones(8), RECORDS)
    device.compute(2)  # the second is ready at 5, and waits until 13
    second = lane.all_reduce(torch.ones(8), RECORDS)
    for collective in (first, second):
        lane.wait(collective)
    assert device.written() == [(RECORDS.collective, 3, 13), (RECORDS.collective, 13, 23)]


@either_nccl
def test_so_does_a_bucket_of_stock_ddp_which_torchs_reducer_launches(device, kind):
    group = kind(device.stub)
    lane = device.communicator(group)
    launched = []
    device.compute(3)
    for _ in range(2):
        collective = lane.announce(RECORDS)
        lane.launched(collective, group.allreduce([torch.ones(8)]))
        launched.append(collective)
        device.compute(2)
    assert device.stub.current.done_ns == device.begin_ns + 7 * US, "what computes waits for none of them"
    for collective in launched:
        lane.waited(collective)
    assert device.written() == [(RECORDS.collective, 3, 13), (RECORDS.collective, 13, 23)]


@needs_torch_28
def test_a_stream_that_is_slow_to_time_a_bucket_holds_up_no_later_one(device):
    """NCCL's stream waits for the stream that computes, and not for ours."""
    lane = device.communicator(FakeNccl(device.stub))
    lane._stream.enqueue(50 * US)
    for _ in range(2):
        lane.wait(lane.all_reduce(torch.ones(8), RECORDS))
    assert device.stub.current.done_ns == device.begin_ns + 2 * TRANSFER_US * US


def test_a_bucket_that_is_not_recorded_needs_no_stream_and_no_event_of_ours(device):
    group = FakeNccl(device.stub)
    device.sink.is_on = False
    for lane in (device.communicator(group), StreamCommunicator(group, DEVICE, None)):  # type: ignore[arg-type]
        recorded = device.stub.count("recorded")
        group.allreduce().wait()
        events_of_nccl = device.stub.count("recorded") - recorded
        lane.wait(lane.all_reduce(torch.ones(8), RECORDS))
        assert device.stub.count("recorded") == recorded + 2 * events_of_nccl
    assert device.written() == []


@needs_torch_28
@pytest.mark.parametrize("fails", ["join", "block"])
def test_an_error_while_a_bucket_is_timed_ends_the_recording_and_not_the_training(device, monkeypatch, fails):
    def fail(*_: object) -> None:
        raise RuntimeError("of ours")

    errors: list[Exception] = []
    monkeypatch.setattr(device.sink, "disable_recording", errors.append, raising=False)
    lane = device.communicator(FakeNccl(device.stub))
    if fails == "join":
        lane._events = SimpleNamespace(join=fail)
    else:
        monkeypatch.setattr(FakeWork, "block_current_stream", fail)
    lane.wait(lane.all_reduce(torch.ones(8), RECORDS))
    assert len(errors) == 1
    assert device.stub.current.done_ns == device.begin_ns + TRANSFER_US * US


def test_over_gloo_an_end_is_a_bound_marked_where_it_was_waited_for(device, monkeypatch):
    monkeypatch.setattr(FakeWork, "block_current_stream", partial(pytest.fail, "a kernel spins"))
    lane = device.communicator(FakeGloo(device.stub))
    device.compute(3)
    collective = lane.all_reduce(torch.ones(8), RECORDS)
    lane.wait(collective)
    assert device.written() == [(RECORDS.collective_bounds, 3, 13)]


def test_over_gloo_a_bucket_of_stock_ddp_is_over_when_its_reducer_has_waited(device, monkeypatch):
    monkeypatch.setattr(FakeWork, "block_current_stream", partial(pytest.fail, "a kernel spins"))
    group = FakeGloo(device.stub)
    lane = device.communicator(group)
    device.compute(3)
    collective = lane.announce(RECORDS)
    lane.launched(collective, group.allreduce([torch.ones(8)]))
    device.compute(20)
    lane.waited(collective)
    assert device.written() == [(RECORDS.collective_bounds, 3, 23)]


def test_what_is_captured_is_neither_marked_nor_joined_by_our_stream(device, monkeypatch):
    lane = device.communicator(FakeNccl(device.stub))
    monkeypatch.setattr(FakeWork, "block_current_stream", partial(pytest.fail, "our stream would join the graph"))
    with device.stub.capturing():
        lane.wait(lane.all_reduce(torch.ones(8), RECORDS))
        with device.stub.on(lane._stream):
            assert not device.stub.is_capturing()
    assert device.written() == []


def test_no_work_outlives_the_wait_for_it(device):
    lane = device.communicator(FakeNccl(device.stub))
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


def test_each_part_of_a_sum_is_timed_on_the_stream_where_it_runs(device, monkeypatch):
    """And not where the second one, which is launched later, is waited for."""
    monkeypatch.setattr(torch.futures, "Future", FakeFuture)

    def part(*_: object) -> None:
        device.compute(TRANSFER_US)

    group = FakeNccl(device.stub)
    sums = SumExecutor("in two parts", (part, part), group)  # type: ignore[arg-type]
    lane = device.communicator(group)
    device.compute(3)
    parts = []
    for number in range(2):
        told = BucketSumRecorder("in two parts", RECORDS, device.sink)  # type: ignore[arg-type]
        collective = lane.run_hook(partial(sums.launch, FakeBucket(), told, number), RECORDS)
        collective.start, collective.end = told.marks
        parts.append(collective)
        device.compute(30)  # the backward goes on
    lane.superseded(parts[0])
    lane.waited(parts[1])
    assert device.written() == [(RECORDS.collective, 3, 13), (RECORDS.collective, 33, 43)]
