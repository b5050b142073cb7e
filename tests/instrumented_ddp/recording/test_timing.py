"""The CUDA time line's bookkeeping, against a device that exists only here.

CI has no GPU, so ``torch.cuda.Event`` and the current stream are replaced by a model of a device with a clock of
its own, which runs behind the host and drifts. tests/gpu holds the same against a real one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp.plans.auto_measuring import Meter
from instrumented_ddp.recording import timing
from instrumented_ddp.recording.timing import CudaTimer, HostTimer, NullTimer, make_bucket_timer
from instrumented_ddp.session import open_session
from overlapscope.trace.collective_log import HEADER_BYTES, CollectiveLogHeader, group_file
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import Flag, Phase


class FakeDevice:
    """Host time is set by the test; the device does what it was given ``lag_ns`` after it was given it.

    On an idle stream it takes ``idle_stream_ns`` instead, in which time passes with every look.
    """

    def __init__(self) -> None:
        self.host_ns = 1_000_000_000
        self.lag_ns = 0
        self.idle_stream_ns = 0
        self.turns_ns: list[int] = []
        """How long others have the device first, one event on the idle stream after the other."""
        self.look_ns = 0
        self.drift_ppm = 0
        self.events_made = 0
        self.is_capturing = False
        self.has_failed = False

    def device_ns(self, host_ns: int) -> int:
        return host_ns + host_ns * self.drift_ppm // 1_000_000 + 123_456_789  # an epoch of its own


class FakeEvent:
    device: FakeDevice

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing, "an event without timing has no time"
        self.device.events_made += 1
        self.happens_ns = -1

    def record(self, stream: object) -> None:
        self._meet_failure()
        assert not self.device.is_capturing, "an event in a graph can never be asked for"
        lag_ns = self.device.lag_ns
        if stream == "idle":
            lag_ns = self.device.turns_ns.pop(0) if self.device.turns_ns else self.device.idle_stream_ns
        self.happens_ns = self.device.host_ns + lag_ns

    def _meet_failure(self) -> None:
        if self.device.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")

    def query(self) -> bool:
        self._meet_failure()
        assert not self.device.is_capturing, "asking for any event invalidates the capture"
        self.device.host_ns += self.device.look_ns
        return self.device.host_ns >= self.happens_ns

    def synchronize(self) -> None:
        self.device.host_ns = max(self.device.host_ns, self.happens_ns)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query(), "asking for the time of an event that has not completed is an error in CUDA"
        distance_ns = self.device.device_ns(end.happens_ns) - self.device.device_ns(self.happens_ns)
        return float(torch.tensor(distance_ns / 1e6, dtype=torch.float32))


class MemoryLog:
    def __init__(self) -> None:
        self.records: list[tuple[bytes, int, int, int]] = []

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        self.records.append((body, step, start_ns, end_ns))


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(FakeEvent, "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "idle")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    monkeypatch.setattr(timing, "host_now_ns", lambda: device.host_ns)
    return device


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def make_timeline(log) -> CudaTimer:
    return CudaTimer(log, torch.device("cuda", 0))


def test_an_event_is_written_in_host_time_once_the_device_has_passed_it(device, log):
    timer = make_timeline(log)
    device.lag_ns = 3_000_000
    start = timer.mark()
    device.host_ns += 1_000_000
    timer.write(b"span", 0, start, timer.mark())
    timer.on_step_start()
    assert log.records == [], "the device is still behind, and nobody waits for it"
    device.host_ns += 10_000_000
    timer.on_step_start()
    ((body, step, start_ns, end_ns),) = log.records
    assert (body, step) == (b"span", 0)
    assert start_ns == pytest.approx(1_003_000_000, abs=100)
    assert end_ns - start_ns == pytest.approx(1_000_000, abs=100)


def test_the_first_anchor_is_the_one_of_several_that_the_host_waits_for_least(device, log):
    """Where others share the device, it may be theirs first."""
    device.turns_ns = [2_000_000, 1_500_000, 20_000, *[2_000_000] * 7]
    timer = make_timeline(log)
    mark = timer.mark()
    timer.write(b"", 0, mark, mark)
    timer.close()
    ((_, _, start_ns, _),) = log.records
    assert start_ns == pytest.approx(device.host_ns, abs=20_000)


def errors_over(steps: int, device: FakeDevice, log: MemoryLog) -> list[int]:
    """How far the time of one mark a step, every 250 ms, is from the truth."""
    timer = make_timeline(log)
    true_ns = []
    for step in range(steps):
        device.host_ns += 250_000_000
        true_ns.append(device.host_ns + device.lag_ns)
        mark = timer.mark()
        timer.write(b"", step, mark, mark)
        timer.on_step_start()
    assert len(log.records) >= steps - 1
    return [abs(start_ns - true) for (_, _, start_ns, _), true in zip(log.records, true_ns, strict=False)]


def test_times_stay_exact_over_hours_because_each_step_is_anchored_anew(device, log):
    # One float32 of milliseconds is good to 16 us after 250 s; over 5,000 s it would be off by 0.2 ms.
    assert max(errors_over(20_000, device, log)) < 10_000


@pytest.mark.parametrize("drift_ppm", [100, -100])
def test_a_device_clock_that_drifts_is_held_within_what_causality_allows(device, log, drift_ppm):
    device.drift_ppm = drift_ppm
    # Unchecked, 100 ppm over 250 s would be 25 ms; within one step it is 25 us.
    assert max(errors_over(1000, device, log)) <= 30_000


@pytest.mark.parametrize("drift_ppm", [10, -10])
def test_a_device_that_is_always_behind_does_not_drift_by_as_much_as_it_is_behind(device, log, drift_ppm):
    device.drift_ppm, device.idle_stream_ns, device.look_ns = drift_ppm, 10_000, 2_000
    device.lag_ns = 50_000_000
    # Unchecked, 10 ppm over an hour would be 36 ms.
    assert max(errors_over(14_400, device, log)) <= 30_000


@pytest.mark.parametrize("drift_ppm", [10, -10])
def test_where_no_stream_overtakes_another_the_device_is_not_waited_for(device, log, drift_ppm):
    device.drift_ppm, device.look_ns = drift_ppm, 2_000
    device.lag_ns = device.idle_stream_ns = 50_000_000
    assert len(errors_over(100, device, log)) >= 99


def test_the_mark_that_ends_a_step_may_begin_the_next(device, log):
    timer = make_timeline(log)
    end_of_step = timer.mark()
    first_ns = device.host_ns
    for step in range(5):
        begin = end_of_step
        for _ in range(10):
            device.host_ns += 1000
            timer.mark()
        device.host_ns += 1_000_000
        end_of_step = timer.mark()
        timer.write(b"step", step, begin, end_of_step)
        timer.on_step_start()
    timer.close()
    starts = [start_ns for _, _, start_ns, _ in log.records]
    ends = [end_ns for _, _, _, end_ns in log.records]
    assert starts[0] == pytest.approx(first_ns, abs=10)
    assert starts[1:] == pytest.approx(ends[:-1], abs=10)


def test_events_come_from_a_pool_that_stops_growing(device, log):
    timer = make_timeline(log)
    made = []
    for step in range(20):
        for _ in range(10):
            mark = timer.mark()
            timer.write(b"", step, mark, mark)
        device.host_ns += 1_000_000
        timer.on_step_start()
        made.append(device.events_made)
    assert made[-1] == made[5]


def test_what_the_device_has_not_passed_at_the_end_is_left_out(device, log):
    timer = make_timeline(log)
    device.lag_ns = 10**12
    mark = timer.mark()
    timer.write(b"", 0, mark, mark)
    timer.close()
    assert log.records == []


def test_a_mark_in_a_capture_is_left_out_and_holds_up_nothing(device, log, caplog):
    timer = make_timeline(log)
    before = timer.mark()
    timer.write(b"before", 0, before, before)
    device.is_capturing = True
    for _ in range(2):
        start = timer.mark()
        timer.write(b"captured", 0, start, timer.mark())
        timer.on_step_start()
    device.is_capturing = False
    after = timer.mark()
    timer.write(b"across", 0, start, after)
    timer.write(b"after", 0, after, after)
    device.host_ns += 1_000_000
    timer.on_step_start()
    assert [body for body, *_ in log.records] == [b"before", b"after"]
    assert len(caplog.records) <= 1, "said once a process"


def test_after_the_device_has_failed_the_training_meets_no_error_of_ours(device, log, caplog):
    timer = make_timeline(log)
    first = timer.mark()
    timer.write(b"first", 0, first, first)
    device.host_ns += 1_000_000
    timer.on_step_start()
    open_phase = timer.mark()
    device.has_failed = True
    timer.write(b"phase", 1, open_phase, timer.mark())
    timer.on_step_start()
    timer.close()
    assert [body for body, *_ in log.records] == [b"first"]
    assert [record.getMessage().count("device-side assert") for record in caplog.records] == [1]


def test_a_failure_that_is_first_met_at_the_end_keeps_nothing_from_being_closed(device, log):
    timer = make_timeline(log)
    timer.write(b"phase", 0, timer.mark(), timer.mark())
    device.has_failed = True
    timer.close()
    assert log.records == []


def test_after_the_device_has_failed_both_logs_are_closed(device, traces):
    session = open_session(traces, 0, "off")
    recorder = session.record(dist.group.WORLD, torch.device("cuda", 0))
    recorder.steps.on_forward_call()
    recorder.steps.enter(Phase.FORWARD)
    dist.all_reduce(torch.ones(1))
    device.has_failed = True
    session.close()
    trace = read_trace(traces)
    assert trace.problems == ()
    header = (session.folder / group_file(0)).read_bytes()[:HEADER_BYTES]
    assert CollectiveLogHeader.unpack(header, session.folder).closed


def test_an_evaluation_of_hours_is_anchored_written_and_costs_no_ever_new_events(device, log):
    timer = make_timeline(log)
    true_ns = []
    for _ in range(14_400):  # within one step
        device.host_ns += 500_000_000
        true_ns.append(device.host_ns)
        mark = timer.mark()
        timer.write(b"evaluation", 0, mark, mark)
    assert len(log.records) > len(true_ns) - 1000
    errors_ns = [abs(start_ns - true) for (_, _, start_ns, _), true in zip(log.records, true_ns, strict=False)]
    # To 16 us after 256 s; without anchors to 0.5 ms after two hours.
    assert max(errors_ns) < 50_000
    assert device.events_made < 2000


def test_with_one_hardware_queue_phases_are_marked_and_buckets_are_not(device, log, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    phases = make_timeline(log)
    made = device.events_made
    buckets = make_bucket_timer(torch.device("cuda", 0), phases)
    buckets.write(b"bucket", 0, buckets.mark(), buckets.mark())
    assert isinstance(buckets, NullTimer)
    assert device.events_made == made, "an event is what destroys the overlap"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in caplog.text
    phase = phases.mark()
    phases.write(b"phase", 0, phase, phase)
    device.host_ns += 1_000_000
    buckets.on_step_start()
    buckets.close()
    assert [body for body, *_ in log.records] == [b"phase"]


def test_with_one_hardware_queue_auto_buckets_can_measure_none_and_say_so(device, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    meter = Meter(torch.device("cuda", 0))
    assert meter.get_timer(torch.device("cuda", 0)).mark() is None
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in caplog.text


@pytest.mark.parametrize("connections", ["", "8", "32"])
def test_with_more_hardware_queues_buckets_are_marked_as_well(log, monkeypatch, connections):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    timer = HostTimer(log)
    assert make_bucket_timer(torch.device("cuda", 0), timer) is timer


def test_the_hosts_time_line_knows_its_times_at_once(log):
    timer = HostTimer(log)
    start = timer.mark()
    timer.write(b"", 0, start, timer.mark())
    ((_, _, start_ns, end_ns),) = log.records
    assert 0 <= start_ns <= end_ns
    assert timer.flags == Flag.NONE
