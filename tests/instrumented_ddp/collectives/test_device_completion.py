"""What runs on a device is seen to end, of whatever sort it is, without a device: works and events are played.

tests/gpu holds what real ones do.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future

from instrumented_ddp.collectives import device_completion
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.collectives.dispatch import _device_of

PATIENCE_S = 30
DEVICE = torch.device("cuda", 0)
SUCCESS, TIMEOUT, COMM_ERROR = 0, 1, 2


class FakeEvent:
    """Passed when the test says so; or the device has failed."""

    all: ClassVar[list[FakeEvent]] = []

    def __init__(self) -> None:
        self.has_passed = False
        self.has_failed = False
        self.all.append(self)

    def record(self, _: object) -> None:
        """On a stream that exists nowhere."""

    def query(self) -> bool:
        if self.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.has_passed


class NcclWork(dist.Work):
    """As torch 2.13's: its future is done at launch, and it is completed also after an error."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = torch.ones(1)
        self.is_over = False
        self.asked = 0
        self.result_future: Future[int] = Future()

    def get_future_result(self) -> Future[int]:
        return self.result_future

    def get_future(self) -> Any:
        future: Future[list[torch.Tensor]] = Future()
        future.set_result([self.outputs])
        return future

    def is_completed(self) -> bool:
        self.asked += 1
        return self.is_over

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        pytest.fail("the host would wait for the device")


class OlderWork(NcclWork):
    def get_future_result(self) -> Future[int]:
        raise RuntimeError("Work::getFutureResult not implemented.")


class Ends:
    def __init__(self) -> None:
        self.failed: list[bool] = []

    def __call__(self, _: int, failed: bool) -> None:
        self.failed.append(failed)


@pytest.fixture
def capturing(monkeypatch) -> list[bool]:
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(FakeEvent, "all", [])
    for module in (dist, distributed_c10d):  # is wrapped by the watch; this puts it back
        monkeypatch.setattr(module, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", distributed_c10d.destroy_process_group)
    return capturing


def fails(error: Exception) -> None:
    raise error


@pytest.fixture
def watch(capturing) -> Iterator[CompletionWatch]:
    watch = CompletionWatch(fails)
    yield watch
    watch.close()


def add(watch: CompletionWatch, work: dist.Work | None) -> Ends:
    ends = Ends()
    watch.add(work, DEVICE, ends)
    return ends


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "never came to be"
        time.sleep(0.001)


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("overlapscope")}


def test_nothing_polls_before_there_is_something_on_a_device(watch):
    before = names_of_threads()
    future: Future[int] = Future()
    watch.add(future, torch.device("cpu"), Ends())
    assert "overlapscope-device-completion" not in names_of_threads() - before
    future.set_result(1)


@pytest.mark.parametrize(("result", "failed"), [(SUCCESS, False), (TIMEOUT, True), (COMM_ERROR, True)])
def test_nccls_watchdog_is_asked_for_the_end_and_whether_it_is_a_failure(watch, result, failed):
    work = NcclWork()
    ends = add(watch, work)
    gone = weakref.ref(work)
    future = work.result_future
    assert work.asked == 0
    del work
    gc.collect()
    assert gone() is None, "its outputs are memory that others want"
    assert ends.failed == []
    future.set_result(result)
    until(lambda: ends.failed)
    assert ends.failed == [failed]


def test_an_older_work_is_asked_itself(watch):
    work = OlderWork()
    ends = add(watch, work)
    until(lambda: work.asked)
    assert ends.failed == []
    work.is_over = True
    until(lambda: ends.failed)
    assert ends.failed == [False]


@pytest.mark.parametrize("why", ["blocking wait", "batch"])
def test_where_nccls_watchdog_does_not_see_a_work_it_is_asked_itself(capturing, monkeypatch, why):
    if why == "blocking wait":
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    else:  # as inside batch_isend_irecv
        monkeypatch.setitem(distributed_c10d._world.pg_coalesce_state, object(), [])
    watch = CompletionWatch(fails)
    work = NcclWork()
    work.is_over = True
    ends = add(watch, work)
    until(lambda: ends.failed)
    watch.close()


def test_a_synchronous_collective_is_over_when_the_device_is_and_not_when_it_is_launched(watch):
    ends = add(watch, None)
    [event] = FakeEvent.all
    other = OlderWork()
    add(watch, other)
    until(lambda: other.asked >= 2)
    assert ends.failed == []
    event.has_passed = True
    until(lambda: ends.failed)
    assert ends.failed == [False]


def test_after_an_error_of_the_device_it_has_failed(watch):
    ends = add(watch, None)
    FakeEvent.all[0].has_failed = True
    until(lambda: ends.failed)
    assert ends.failed == [True]


def test_of_one_that_does_not_end_it_is_told_whether_its_device_has_come_to_it(watch):
    work, looks = NcclWork(), []
    before = watch.mark_before(DEVICE)
    watch.add(work, DEVICE, Ends(), before=before, on_reached_change=looks.append)
    until(lambda: looks)
    FakeEvent.all[0].has_passed = True
    until(lambda: len(looks) == 2)
    other_looks: list[bool] = []
    watch.add(NcclWork(), DEVICE, Ends(), before=before, on_reached_change=other_looks.append)
    until(lambda: other_looks)
    assert (looks, other_looks) == ([False, True], [True]), "once each time that it changes"


def test_what_devices_come_to_after_a_failure_says_nothing(watch):
    """NCCL lets go of them when it aborts."""
    looks: list[bool] = []
    failing = NcclWork()
    watch.add(failing, DEVICE, ends := Ends())
    watch.add(NcclWork(), DEVICE, Ends(), before=watch.mark_before(DEVICE), on_reached_change=looks.append)
    until(lambda: looks)
    failing.result_future.set_result(TIMEOUT)
    until(lambda: ends.failed)
    FakeEvent.all[0].has_passed = True
    time.sleep(0.2)
    assert looks == [False]


def test_nobody_asks_for_that_where_collectives_end(watch):
    marks, looks = [], []
    for _ in range(20):
        work = NcclWork()
        marks.append(watch.mark_before(DEVICE))
        ends = Ends()
        watch.add(work, DEVICE, ends, before=marks[-1], on_reached_change=looks.append)
        work.result_future.set_result(SUCCESS)
        until(lambda ends=ends: ends.failed)
    assert looks == []
    assert len(FakeEvent.all) < len(marks), "those of what is over are used again"


def test_an_event_is_of_one_device(watch, monkeypatch):
    devices = [DEVICE, torch.device("cuda", 1)]
    recorded: list[tuple[FakeEvent, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(FakeEvent, "record", lambda event, stream: recorded.append((event, stream)))
    for device in devices * 10:
        work = NcclWork()
        watch.add(work, device, ends := Ends(), before=watch.mark_before(device))
        work.result_future.set_result(SUCCESS)
        until(lambda ends=ends: ends.failed)
    on_first, on_second = ({id(event) for event, stream in recorded if stream == device} for device in devices)
    assert on_first.isdisjoint(on_second)


@pytest.mark.parametrize("why", ["on the host", "in a capture", "the device has failed"])
def test_nothing_is_marked_where_that_is_not_possible(watch, capturing, monkeypatch, why):
    capturing[0] = why == "in a capture"
    if why == "the device has failed":
        monkeypatch.setattr(FakeEvent, "record", lambda *_: fails(RuntimeError("CUDA error: device-side assert")))
    assert watch.mark_before(torch.device("cpu") if why == "on the host" else DEVICE) is None


def test_a_device_that_fails_while_it_is_asked_whether_it_has_come_somewhere_does_no_harm(watch):
    looks: list[bool] = []
    work, ends, before = NcclWork(), Ends(), watch.mark_before(DEVICE)
    watch.add(work, DEVICE, ends, before=before, on_reached_change=looks.append)
    until(lambda: looks)
    FakeEvent.all[0].has_failed = True
    time.sleep(0.2)
    work.result_future.set_result(COMM_ERROR)
    until(lambda: ends.failed)
    assert (ends.failed, looks) == ([True], [False])


def test_what_is_captured_into_a_graph_is_not_waited_for(watch, capturing):
    capturing[0] = True
    work = NcclWork()
    ends = [add(watch, one) for one in (work, None)]
    assert [one.failed for one in ends] == [[False], [False]], "it will never be seen to end"
    assert FakeEvent.all == []
    assert work.asked == 0


def reference_to_one_that_runs(watch: CompletionWatch) -> weakref.ref[dist.Work]:
    work = OlderWork()
    add(watch, work)
    until(lambda: work.asked)
    return weakref.ref(work)


def test_works_are_dropped_before_their_process_group_goes(watch):
    gone = reference_to_one_that_runs(watch)
    dist.destroy_process_group()
    until(lambda: gc.collect() is not None and gone() is None)


def test_who_closes_does_not_wait_for_a_device_that_hangs(capturing):
    watch = CompletionWatch(fails)
    hangs, is_over = add(watch, NcclWork()), add(watch, None)
    FakeEvent.all[0].has_passed = True
    watch.close()
    assert (hangs.failed, is_over.failed) == ([], [False])


def test_a_thread_that_asks_events_is_in_the_mode_in_which_captures_of_others_do_not_matter(monkeypatch):
    asked = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            asked.append(mode._obj.value)
            return 0

    monkeypatch.setattr(device_completion.ctypes, "CDLL", Driver)
    device_completion._ignore_captures_of_other_threads()
    assert asked == [1]


def test_where_a_collective_runs_is_told_by_its_first_tensor():
    meta = torch.empty(0, device="meta")
    assert _device_of([[meta]]).type == _device_of([meta]).type == _device_of(meta).type == "meta"
    assert _device_of([]).type == "cpu"
