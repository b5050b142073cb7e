"""What runs on a device is seen to end, of whatever sort it is: works are played, and the driver is a stub.

tests/gpu holds what real ones do.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future

from instrumented_ddp import native
from instrumented_ddp.collectives import device_events
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.collectives.device_events import TorchEvents, make_device_events
from instrumented_ddp.collectives.dispatch import _device_of
from tests.instrumented_ddp.device_stub import DEVICE, OTHER_DEVICE, Stub, StubStream

PATIENCE_S = 30
LONG_NS = 10**12
needs_native = pytest.mark.skipif(not native.IS_NATIVE, reason="the code in C could not be compiled here")
SUCCESS, TIMEOUT, COMM_ERROR = 0, 1, 2


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


@pytest.fixture(params=[pytest.param(True, marks=needs_native, id="C"), pytest.param(False, id="Python")])
def device(request: pytest.FixtureRequest, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A device that breaks no rule of CUDA's until the end of the test, with events through its driver or torch."""
    monkeypatch.setattr(native, "IS_NATIVE", request.param)
    for module in (dist, distributed_c10d):  # is wrapped by the watch; this puts it back
        monkeypatch.setattr(module, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", distributed_c10d.destroy_process_group)
    yield stub
    assert stub.count("violations") == 0


def fails(error: Exception) -> None:
    raise error


@pytest.fixture
def watch(device) -> Iterator[CompletionWatch]:
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
def test_where_nccls_watchdog_does_not_see_a_work_it_is_asked_itself(device, monkeypatch, why):
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


def test_a_synchronous_collective_is_over_when_the_device_is_and_not_when_it_is_launched(watch, device):
    device.default.enqueue(LONG_NS)
    ends = add(watch, None)
    other = OlderWork()
    add(watch, other)
    until(lambda: other.asked >= 2)
    assert ends.failed == []
    device.advance(LONG_NS)
    until(lambda: ends.failed)
    assert ends.failed == [False]


def test_after_an_error_of_the_device_it_has_failed(watch, device):
    device.default.enqueue(LONG_NS)
    ends = add(watch, None)
    device.fail()
    until(lambda: ends.failed)
    assert ends.failed == [True]


def test_of_one_that_does_not_end_it_is_told_whether_its_device_has_come_to_it(watch, device):
    device.default.enqueue(LONG_NS)
    work, looks = NcclWork(), []
    before = watch.mark_before(DEVICE)
    watch.add(work, DEVICE, Ends(), before=before, on_reached_change=looks.append)
    until(lambda: looks)
    device.advance(LONG_NS)
    until(lambda: len(looks) == 2)
    other_looks: list[bool] = []
    watch.add(NcclWork(), DEVICE, Ends(), before=before, on_reached_change=other_looks.append)
    until(lambda: other_looks)
    assert (looks, other_looks) == ([False, True], [True]), "once each time that it changes"


def test_what_devices_come_to_after_a_failure_says_nothing(watch, device):
    """NCCL lets go of them when it aborts."""
    device.default.enqueue(LONG_NS)
    looks: list[bool] = []
    failing = NcclWork()
    watch.add(failing, DEVICE, ends := Ends())
    watch.add(NcclWork(), DEVICE, Ends(), before=watch.mark_before(DEVICE), on_reached_change=looks.append)
    until(lambda: looks)
    failing.result_future.set_result(TIMEOUT)
    until(lambda: ends.failed)
    device.advance(LONG_NS)
    time.sleep(0.2)
    assert looks == [False]


def end_some(watch: CompletionWatch, device: torch.device, count: int, *looks: Any) -> None:
    """Have collectives on a device, one after the other, that end at once."""
    for _ in range(count):
        work = NcclWork()
        watch.add(work, device, ends := Ends(), before=watch.mark_before(device), on_reached_change=looks[0])
        work.result_future.set_result(SUCCESS)
        until(lambda ends=ends: ends.failed)


def test_nobody_asks_for_that_where_collectives_end(watch, device):
    looks: list[bool] = []
    end_some(watch, DEVICE, 20, looks.append)
    assert looks == []
    assert device.count("queries") == 0
    assert device.count("created") < 20, "those of what is over are used again"


def test_an_event_is_of_one_device(watch):
    """Another's would be a violation."""
    for device in (DEVICE, OTHER_DEVICE) * 5:
        end_some(watch, device, 1, pytest.fail)


@pytest.mark.parametrize("why", ["on the host", "in a capture", "the device has failed"])
def test_nothing_is_marked_where_that_is_not_possible(watch, device, why):
    watch.mark_before(DEVICE)
    recorded = device.count("recorded")
    with device.capturing() if why == "in a capture" else nullcontext():
        if why == "the device has failed":
            device.fail()
        assert watch.mark_before(torch.device("cpu") if why == "on the host" else DEVICE) is None
    assert device.count("recorded") == recorded


def test_a_device_that_fails_while_it_is_asked_whether_it_has_come_somewhere_does_no_harm(watch, device):
    device.default.enqueue(LONG_NS)
    looks: list[bool] = []
    work, ends, before = NcclWork(), Ends(), watch.mark_before(DEVICE)
    watch.add(work, DEVICE, ends, before=before, on_reached_change=looks.append)
    until(lambda: looks)
    device.fail()
    time.sleep(0.2)
    work.result_future.set_result(COMM_ERROR)
    until(lambda: ends.failed)
    assert (ends.failed, looks) == ([True], [False])


def test_what_is_captured_into_a_graph_is_not_waited_for(watch, device):
    work = NcclWork()
    with device.capturing():
        ends = [add(watch, one) for one in (work, None)]
    assert [one.failed for one in ends] == [[False], [False]], "it will never be seen to end"
    assert device.count("recorded") == 0
    assert work.asked == 0


def test_a_capture_by_the_training_is_not_invalidated_by_queries(watch, device):
    device.default.enqueue(LONG_NS)
    ends = add(watch, None)
    with device.capturing(StubStream(device, DEVICE)):
        queries = device.count("queries")
        until(lambda: device.count("queries") > queries)
    device.advance(LONG_NS)
    until(lambda: ends.failed)
    assert ends.failed == [False]


def reference_to_one_that_runs(watch: CompletionWatch) -> weakref.ref[dist.Work]:
    work = OlderWork()
    add(watch, work)
    until(lambda: work.asked)
    return weakref.ref(work)


def test_works_are_dropped_before_their_process_group_goes(watch):
    gone = reference_to_one_that_runs(watch)
    dist.destroy_process_group()
    until(lambda: gc.collect() is not None and gone() is None)


def test_who_closes_does_not_wait_for_a_device_that_hangs(device):
    watch = CompletionWatch(fails)
    is_over, hangs = add(watch, None), add(watch, NcclWork())
    watch.close()
    assert (hangs.failed, is_over.failed) == ([], [False])


# -- events themselves -------------------------------------------------------------------------------------------------


def test_a_stream_waits_for_what_the_current_one_was_given_so_far(device):
    events, ours = make_device_events(DEVICE), StubStream(device, DEVICE)
    device.default.enqueue(300)
    assert events.join(ours)
    device.default.enqueue(500)
    ours.enqueue(10)
    assert ours.done_ns == device.host_ns + 310
    with device.on(ours):
        assert events.join(ours)
    assert ours.done_ns == device.host_ns + 310


def test_nothing_joins_a_capture(device):
    events, ours = make_device_events(DEVICE), StubStream(device, DEVICE)
    with device.capturing():
        assert events.join(ours) is False
        assert events.record() is None
        with device.on(ours):
            assert not device.is_capturing()
    event = events.record()
    assert event is not None
    assert event.query()


def test_a_failed_device_is_an_error_of_who_asks(device):
    events = make_device_events(DEVICE)
    event = events.record()
    device.fail()
    for act in (events.record, lambda: events.join(StubStream(device, DEVICE)), event.query):
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ASSERT"):
            act()


def test_an_event_that_somebody_keeps_is_not_recorded_again(device):
    events = make_device_events(DEVICE)
    first = events.record()
    device.default.enqueue(LONG_NS)
    second = events.record()
    assert (first.query(), second.query()) == (True, False)
    del first
    third = events.record()
    assert (second.query(), third.query(), device.count("created")) == (False, False, 2)


@needs_native
def test_without_a_driver_torch_records(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(device_events, "find_driver", lambda: str(tmp_path / "none.so"))
    assert isinstance(make_device_events(DEVICE), TorchEvents)


@needs_native
def test_events_that_are_over_leave_nothing_on_the_device(stub):
    events = make_device_events(DEVICE)
    kept = [events.record() for _ in range(40)]
    kept.clear()
    assert stub.count("alive") == 40
    del events
    assert (stub.count("alive"), stub.count("retained")) == (0, 0)


def test_where_a_collective_runs_is_told_by_its_first_tensor():
    meta = torch.empty(0, device="meta")
    host = torch.empty(0)
    for arguments in ([[[meta]], host], [[meta], [host]], [meta, 1], [[[]], [meta], host], [None, "sum", meta]):
        assert _device_of(arguments).type == "meta"
    assert _device_of([]).type == _device_of([[[]], 3]).type == "cpu"
