"""Times of work on a device, by the timer in C and by its twin in Python, on a stub of the driver.

tests/gpu holds the same against a real device.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp import native
from instrumented_ddp.plans.auto_measuring import Meter
from instrumented_ddp.recording import timing
from instrumented_ddp.recording.timing import CudaTimer, HostTimer, NullTimer, make_bucket_timer, make_timer
from instrumented_ddp.session import open_session
from overlapscope.trace.collective_log import HEADER_BYTES, CollectiveLogHeader, group_file
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import RECORD_BYTES, Flag, Phase
from tests.instrumented_ddp.device_stub import DEVICE, Stub, StubStream, compile_stub, play_torch

MS = 1_000_000
PATIENCE_S = 30
needs_native = pytest.mark.skipif(not native.IS_NATIVE, reason="the code in C could not be compiled here")


class Log:
    """An event log, and what is in it."""

    def __init__(self, folder: Path, limit_bytes: int = 64 * MS) -> None:
        self.writer = EventLogWriter(folder / "events.log", limit_bytes, native.RecordStore)

    @property
    def records(self) -> list[tuple[str, int, int, int]]:
        """Name, step, start and end of each record, in the order in which they were written."""
        rows = [self.writer._read(number) for number in range(1, self.writer.latest + 1)]
        numbers = [
            [int.from_bytes(row[at : at + size], "little") for at, size in ((20, 4), (4, 8), (12, 8))] for row in rows
        ]
        return [(row[28:56].decode().strip(), *of_row) for row, of_row in zip(rows, numbers, strict=True)]

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.records]


class Device:
    """A device and its timer, which looks at it when it is told to."""

    def __init__(self, stub: Stub, log: Log, make: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.stub = stub
        self.log = log
        self.anchors = StubStream(stub, DEVICE)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.anchors)
        self._make = make

    def make_timer(self) -> Any:
        self.timer = self._make(self.log.writer)
        self.mark = self.timer.mark
        return self.timer

    def poll(self) -> None:
        """As at a step's start in Python, or now and then in C."""
        getattr(self.timer, "poll", self.timer.on_step_start)()

    def write(self, name: str, start: Any, end: Any, step: int = 0) -> None:
        self.timer.write(name.encode().ljust(28), step, start, end)

    def write_mark(self, name: str, step: int = 0) -> None:
        mark = self.mark()
        self.write(name, mark, mark, step)

    def lag(self, lag_ns: int, stream: StubStream | None = None) -> None:
        """From now on, what a stream is given happens so much later."""
        self.stub.call("stub_lag", (stream or self.stub.default).cuda_stream, lag_ns)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path)
    yield log
    log.writer.close()


def make_native(writer: EventLogWriter) -> Any:
    return timing._make_event_timer(DEVICE, writer.store)


def make_twin(writer: EventLogWriter) -> Any:
    return CudaTimer(writer, DEVICE)


@pytest.fixture(params=[pytest.param(make_native, marks=needs_native, id="C"), pytest.param(make_twin, id="Python")])
def device(request: pytest.FixtureRequest, stub: Stub, log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device that breaks no rule of CUDA's until the end of the test."""
    device = Device(stub, log, request.param, monkeypatch)
    yield device
    assert stub.count("violations") == 0


def test_an_event_is_written_in_host_time_once_the_device_has_passed_it(device):
    device.make_timer()
    device.lag(3 * MS)
    start, begin_ns = device.mark(), device.stub.host_ns
    device.stub.advance(MS)
    device.write("span", start, device.mark(), step=7)
    device.poll()
    assert device.log.records == [], "the device is still behind, and nobody waits for it"
    device.stub.advance(10 * MS)
    device.poll()
    ((name, step, start_ns, end_ns),) = device.log.records
    assert (name, step) == ("span", 7)
    assert start_ns == pytest.approx(begin_ns + 3 * MS, abs=100)
    assert end_ns - start_ns == pytest.approx(MS, abs=100)


def test_the_first_anchor_is_the_one_of_several_that_the_host_waits_for_least(device):
    """Where others share the device, it may be theirs first."""
    for wait_ns in (2_000_000, 1_500_000, 20_000, *[2_000_000] * 7):
        device.stub.call("stub_delay", device.anchors.cuda_stream, wait_ns)
    device.make_timer()
    device.write_mark("")
    device.timer.close()
    ((_, _, start_ns, _),) = device.log.records
    assert start_ns == pytest.approx(device.stub.host_ns, abs=20_000)


def errors_over(steps: int, device: Device, lag_ns: int = 0) -> list[int]:
    """How far the time of one mark a step, every 250 ms, is from the truth."""
    device.make_timer()
    device.lag(lag_ns)
    true_ns = []
    for step in range(steps):
        device.stub.advance(250 * MS)
        true_ns.append(device.stub.host_ns + lag_ns)
        device.write_mark("", step)
        device.poll()
    assert len(device.log.records) >= steps - 1
    return [abs(start_ns - true) for (_, _, start_ns, _), true in zip(device.log.records, true_ns, strict=False)]


def test_times_stay_exact_over_hours_because_each_step_is_anchored_anew(device):
    # One float32 of milliseconds is good to 16 us after 250 s; over 5,000 s it would be off by 0.2 ms.
    assert max(errors_over(20_000, device)) < 10_000


@pytest.mark.parametrize("drift_ppm", [100, -100])
def test_a_device_clock_that_drifts_is_held_within_what_causality_allows(device, drift_ppm):
    device.stub.call("stub_drift", drift_ppm)
    # Unchecked, 100 ppm over 250 s would be 25 ms; within one step it is 25 us.
    assert max(errors_over(1000, device)) <= 30_000


@pytest.mark.parametrize("drift_ppm", [10, -10])
def test_a_device_that_is_always_behind_does_not_drift_by_as_much_as_it_is_behind(device, drift_ppm):
    device.stub.call("stub_drift", drift_ppm)
    device.stub.call("stub_query_takes", 2_000)
    device.lag(10_000, device.anchors)
    # Unchecked, 10 ppm over an hour would be 36 ms.
    assert max(errors_over(14_400, device, lag_ns=50 * MS)) <= 30_000


@pytest.mark.parametrize("drift_ppm", [10, -10])
def test_where_no_stream_overtakes_another_the_device_is_not_waited_for(device, drift_ppm):
    device.stub.call("stub_drift", drift_ppm)
    device.stub.call("stub_query_takes", 2_000)
    device.lag(50 * MS, device.anchors)
    assert len(errors_over(100, device, lag_ns=50 * MS)) >= 99


def test_the_mark_that_ends_a_step_may_begin_the_next(device):
    device.make_timer()
    end_of_step, first_ns = device.mark(), device.stub.host_ns
    for step in range(5):
        begin = end_of_step
        for _ in range(10):
            device.stub.advance(1000)
            device.mark()
        device.stub.advance(MS)
        end_of_step = device.mark()
        device.write("step", begin, end_of_step, step)
        device.poll()
    device.timer.close()
    starts = [start_ns for _, _, start_ns, _ in device.log.records]
    ends = [end_ns for _, _, _, end_ns in device.log.records]
    assert starts[0] == pytest.approx(first_ns, abs=10)
    assert starts[1:] == ends[:-1]


def test_events_come_from_a_pool_that_stops_growing(device):
    device.make_timer()
    made = []
    for step in range(20):
        for _ in range(100):
            device.write_mark("", step)
        device.stub.advance(MS)
        device.poll()
        made.append(device.stub.count("created"))
    assert made[-1] == made[5]


def test_what_the_device_has_not_passed_at_the_end_is_left_out(device):
    device.make_timer()
    device.lag(10**12)
    device.write_mark("")
    device.timer.close()
    assert device.log.records == []


def test_a_stream_that_hangs_holds_up_no_other(device):
    """As that of a collective which a rank never launches."""
    device.make_timer()
    ours = StubStream(device.stub, DEVICE)
    before = device.mark()
    ours.enqueue(10**15)
    device.write("collective", before, device.mark(ours))
    device.write("of both", device.mark(ours), device.mark())
    device.stub.advance(MS)
    device.write("compute", before, device.mark())
    device.poll()
    assert device.log.names == ["compute"]
    device.stub.advance(10**15)
    device.poll()
    assert sorted(device.log.names) == ["collective", "compute", "of both"]


def test_a_mark_in_a_capture_is_left_out_and_holds_up_nothing(device, caplog):
    device.make_timer()
    device.write_mark("before")
    with device.stub.capturing():
        for _ in range(2):
            start = device.mark()
            device.write("captured", start, device.mark())
            device.timer.on_step_start()
    device.write("across", start, device.mark())
    device.write_mark("after")
    device.stub.advance(MS)
    device.poll()
    assert device.log.names == ["before", "after"]
    assert len(caplog.records) <= 1, "said once a process"


def test_a_stream_that_joined_a_capture_is_captured_too(device):
    device.make_timer()
    ours = StubStream(device.stub, DEVICE)
    with device.stub.capturing():
        ours.wait_stream(device.stub.default)
        assert device.mark(ours) is None


def test_after_the_device_has_failed_the_training_meets_no_error_of_ours(device, caplog):
    device.make_timer()
    device.write_mark("first")
    device.stub.advance(MS)
    device.poll()
    open_phase = device.mark()
    device.stub.fail()
    device.write("phase", open_phase, device.mark(), 1)
    device.timer.on_step_start()
    assert device.mark() is None
    device.timer.close()
    assert device.log.names == ["first"]
    assert [record.getMessage().count("CUDA_ERROR_ASSERT") for record in caplog.records] == [1]


def test_a_failure_that_is_first_met_at_the_end_keeps_nothing_from_being_closed(device, caplog):
    device.make_timer()
    device.write("phase", device.mark(), device.mark())
    device.stub.fail()
    device.timer.close()
    assert device.log.records == []
    assert len(caplog.records) == 1


def test_what_was_timed_before_the_device_failed_is_written(device):
    device.make_timer()
    start = device.mark()
    keeps = device.mark()
    device.write("one", keeps, keeps)
    device.poll()
    device.stub.fail()
    device.mark()
    device.write("start", keeps, keeps)
    device.write("neither", start, None)
    device.timer.close()
    assert device.log.names == ["one", "start"]


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
def test_after_the_device_has_failed_both_logs_are_closed(stub, traces, monkeypatch, is_native):
    monkeypatch.setattr(native, "IS_NATIVE", is_native)
    session = open_session(traces, 0, "off")
    recorder = session.record(dist.group.WORLD, torch.device("cuda", 0))
    assert isinstance(recorder.timer, CudaTimer) == (not is_native)
    recorder.steps.on_forward_call()
    recorder.steps.enter(Phase.FORWARD)
    dist.all_reduce(torch.ones(1))
    stub.fail()
    session.close()
    trace = read_trace(traces)
    assert trace.problems == ()
    header = (session.folder / group_file(0)).read_bytes()[:HEADER_BYTES]
    assert CollectiveLogHeader.unpack(header, session.folder).closed


def test_an_evaluation_of_hours_is_anchored_written_and_costs_no_ever_new_events(device):
    device.make_timer()
    true_ns = []
    for number in range(14_400):  # within one step
        device.stub.advance(500 * MS)
        true_ns.append(device.stub.host_ns)
        device.write_mark("evaluation")
        if number % 500 == 0 and hasattr(device.timer, "poll"):
            device.timer.poll()
    assert len(device.log.records) > len(true_ns) - 1000
    errors_ns = [abs(start_ns - true) for (_, _, start_ns, _), true in zip(device.log.records, true_ns, strict=False)]
    # To 16 us after 256 s; without anchors to 0.5 ms after two hours.
    assert max(errors_ns) < 50_000
    assert device.stub.count("created") < 2000


STREAMS = 3
WORK = st.one_of(
    st.tuples(st.just("enqueue"), st.integers(0, STREAMS - 1), st.integers(0, 30 * MS)),
    st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("advance"), st.integers(0, 200 * MS), st.none()),
    st.tuples(st.just("mark"), st.integers(0, STREAMS - 1), st.none()),
    st.tuples(st.just("poll"), st.none(), st.none()),
)


@given(work=st.lists(WORK, max_size=60))
def test_every_mark_is_written_at_its_time_whatever_the_streams_do(stub_library, tmp_path_factory, work):
    """Against an oracle: a stream is done at a time that is known here as well."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub = Stub(stub_library)
        play_torch(stub, monkeypatch)
        for make in (make_native, make_twin) if native.IS_NATIVE else (make_twin,):
            log = Log(tmp_path_factory.mktemp("log"))
            device = Device(stub, log, make, monkeypatch)
            device.make_timer()
            streams = [StubStream(stub, DEVICE) for _ in range(STREAMS)]
            true_ns: dict[str, int] = {}
            for act, first, second in work:
                if act == "enqueue":
                    streams[first].enqueue(second)
                elif act == "wait":
                    streams[first].wait_stream(streams[second])
                elif act == "advance":
                    stub.advance(first)
                elif act == "mark":
                    name = str(len(true_ns))
                    true_ns[name] = max(stub.host_ns, streams[first].done_ns)
                    mark = device.mark(streams[first])
                    device.write(name, mark, mark)
                else:
                    device.poll()
                    due = {name for name, at_ns in true_ns.items() if at_ns <= stub.host_ns}
                    assert set(log.names) == due
            stub.advance(2_000 * MS)
            device.poll()
            found = {name: start_ns for name, _, start_ns, _ in log.records}
            assert found.keys() == true_ns.keys()
            assert all(abs(found[name] - true_ns[name]) < 500 for name in found)
            log.writer.close()
            stub.call("stub_reset")
            stub.call("stub_enter", 0)


def test_with_one_hardware_queue_phases_are_marked_and_buckets_are_not(device, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    phases = device.make_timer()
    recorded = device.stub.count("recorded")
    buckets = make_bucket_timer(DEVICE, phases)
    buckets.write(b"bucket", 0, buckets.mark(), buckets.mark())
    assert isinstance(buckets, NullTimer)
    assert device.stub.count("recorded") == recorded, "an event is what destroys the overlap"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in caplog.text
    device.write_mark("phase")
    device.stub.advance(MS)
    buckets.on_step_start()
    buckets.close()
    assert device.log.names == ["phase"]


def test_with_one_hardware_queue_auto_buckets_can_measure_none_and_say_so(stub, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    meter = Meter(DEVICE)
    assert meter.get_timer(DEVICE).mark() is None
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in caplog.text


@pytest.mark.parametrize("connections", ["", "8", "32"])
def test_with_more_hardware_queues_buckets_are_marked_as_well(log, monkeypatch, connections):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    timer = HostTimer(log.writer)
    assert make_bucket_timer(DEVICE, timer) is timer


def test_the_hosts_time_line_knows_its_times_at_once(log):
    timer = HostTimer(log.writer)
    start = timer.mark()
    timer.write(b"".ljust(28), 0, start, timer.mark())
    ((_, _, start_ns, end_ns),) = log.records
    assert 0 <= start_ns <= end_ns
    assert timer.flags == Flag.NONE


# -- what only the timer in C has: a driver, a thread, and events of its own -------------------------------------------


@pytest.fixture
def threaded(stub: Stub, log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device whose timer has its thread, as in a training."""
    device = Device(stub, log, lambda writer: make_timer(DEVICE, writer), monkeypatch)
    device.make_timer()
    yield device
    stub.call("stub_hang", 0)
    device.timer.close()
    assert stub.count("violations") == 0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "never came to be"
        time.sleep(0.001)


@needs_native
def test_the_thread_writes_while_the_interpreter_lock_is_held(threaded):
    threaded.write_mark("one")
    threaded.stub.advance(MS)
    memory = threaded.log.writer._buffer
    deadline = time.monotonic() + PATIENCE_S
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * PATIENCE_S)  # the loop gives the lock to nobody who asks for it
    try:
        while memory.find(b"one", HEADER_BYTES, HEADER_BYTES + RECORD_BYTES) < 0:
            assert time.monotonic() < deadline
    finally:
        sys.setswitchinterval(interval)


@needs_native
def test_who_closes_does_not_wait_for_a_driver_that_hangs(threaded):
    threaded.write_mark("one")
    threaded.stub.call("stub_hang", 1)
    time.sleep(0.1)
    begin = time.monotonic()
    threaded.timer.close()
    assert time.monotonic() - begin < PATIENCE_S
    threaded.log.writer.close()
    threaded.stub.call("stub_hang", 0)


@needs_native
def test_a_capture_by_the_training_is_not_invalidated_by_the_thread(threaded):
    threaded.write_mark("before")
    with threaded.stub.capturing():
        queries = threaded.stub.count("queries")
        until(lambda: threaded.stub.count("queries") > queries)
    threaded.stub.advance(MS)
    until(lambda: threaded.log.names == ["before"])


@needs_native
def test_a_failure_that_the_thread_meets_is_reported_by_the_training(threaded, caplog):
    threaded.write_mark("one")
    threaded.stub.fail()
    until(lambda: threaded.mark() is None)
    assert [record.getMessage().count("CUDA_ERROR_ASSERT") for record in caplog.records] == [1]


@needs_native
def test_a_log_that_needs_disk_blocks_gets_them_from_the_next_mark(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(EventLogWriter, "chunk_slots", 4)
    log = Log(tmp_path)
    device = Device(stub, log, make_native, monkeypatch)
    device.make_timer()
    for number in range(6):
        device.write_mark(str(number))
    device.poll()
    assert log.names == ["0", "1", "2", "3"]
    device.mark()
    device.poll()
    assert log.names == ["0", "1", "2", "3", "4", "5"]
    log.writer.close()


@needs_native
def test_a_full_log_is_the_same_ring_as_in_python(stub, tmp_path, monkeypatch):
    limit_bytes = HEADER_BYTES + 64 * RECORD_BYTES
    log = Log(tmp_path, limit_bytes)
    device = Device(stub, log, make_native, monkeypatch)
    device.make_timer()
    for number in range(200):
        device.write_mark(str(number), number)
        device.poll()
    (start_ns,) = {start_ns for _, _, start_ns, _ in log.records}
    twin = EventLogWriter(tmp_path / "twin.log", limit_bytes)
    for number in range(200):
        twin.append(str(number).encode().ljust(28), number, start_ns, start_ns)
    log.writer.close()
    twin.close()
    assert log.writer.path.read_bytes() == twin.path.read_bytes()


@needs_native
def test_events_are_of_the_timers_device_whichever_is_current(stub, log, monkeypatch):
    device = Device(stub, log, make_native, monkeypatch)
    device.make_timer()
    stub.call("stub_enter", 1)
    depth = stub.count("depth")
    device.write_mark("one")
    device.poll()
    assert stub.count("depth") == depth, "what was current is current again"
    assert log.names == ["one"]
    assert stub.count("violations") == 0


@needs_native
def test_a_timer_that_is_over_leaves_nothing_on_the_device(stub, log, monkeypatch):
    device = Device(stub, log, make_native, monkeypatch)
    for _ in range(3):
        timer = device.make_timer()
        pending = device.mark(StubStream(stub, DEVICE))
        device.lag(10**12)
        device.write("never", pending, device.mark())
        timer.close()
        del timer, device.timer, device.mark, pending
        assert (stub.count("alive"), stub.count("retained")) == (0, 0)


@needs_native
def test_a_forked_process_marks_nothing_and_ends(threaded):
    threaded.write_mark("parent")
    pid = os.fork()
    if pid == 0:
        mark = threaded.mark()
        threaded.write("child", mark, mark)
        threaded.timer.close()
        os._exit(0 if mark is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    threaded.stub.advance(MS)
    until(lambda: threaded.log.names == ["parent"])


@needs_native
def test_hip_has_the_same_functions_under_other_names(tmp_path, log, monkeypatch):
    path = compile_stub(tmp_path, "-DHIP")
    stub = Stub(path)
    anchors = StubStream(stub, DEVICE)
    stub.call("stub_enter", 0)
    timer = native.EventTimer(
        log.writer.store, str(path), 0, anchors.cuda_stream, lambda _: 0, lambda: None, pytest.fail, Flag.DEVICE_CLOCK
    )
    mark = timer.mark()
    timer.write(b"hip".ljust(28), 0, mark, mark)
    timer.poll()
    assert log.names == ["hip"]


@needs_native
def test_without_a_driver_torch_marks(stub, log, tmp_path, monkeypatch):
    for path in (tmp_path / "none.so", compile_stub(tmp_path, "-DcuEventQuery=cuEventQueryOfLater")):
        monkeypatch.setattr(timing, "find_driver", lambda path=path: str(path))
        assert isinstance(make_timer(DEVICE, log.writer), CudaTimer)


@needs_native
@pytest.mark.parametrize(
    "arguments", [(), (b"short", 0, None, None), (bytes(28), -1, None, None), (bytes(28), 0, 1, 2)]
)
def test_what_is_no_record_is_refused(stub, log, monkeypatch, arguments):
    device = Device(stub, log, make_native, monkeypatch)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        device.make_timer().write(*arguments)
    with pytest.raises(TypeError):
        native.EventTimer(object(), str(stub.path), 0, 0, int, int, int, Flag.NONE)
    with pytest.raises(AttributeError):
        device.mark("no stream")
