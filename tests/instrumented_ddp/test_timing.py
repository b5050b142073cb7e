"""The CUDA time line's bookkeeping, against a device that exists only here.

CI has no GPU, so ``torch.cuda.Event`` and the current stream are replaced by a model of a device with a clock of
its own, which runs behind the host and drifts. tests/gpu holds the same against a real one.
"""

from __future__ import annotations

import pytest
import torch

from instrumented_ddp import timing
from instrumented_ddp.timing import CudaTimeline, HostTimeline
from overlapscope.trace.format import Flag


class FakeDevice:
    """Host time is set by the test; the device does what it was given ``lag_ns`` after it was given it.

    On an idle stream it takes ``idle_stream_ns`` instead, in which time passes with every look.
    """

    def __init__(self) -> None:
        self.host_ns = 1_000_000_000
        self.lag_ns = 0
        self.idle_stream_ns = 0
        self.look_ns = 0
        self.drift_ppm = 0
        self.events_made = 0

    def device_ns(self, host_ns: int) -> int:
        return host_ns + host_ns * self.drift_ppm // 1_000_000 + 123_456_789  # an epoch of its own


class FakeEvent:
    device: FakeDevice

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing, "an event without timing has no time"
        self.device.events_made += 1
        self.happens_ns = -1

    def record(self, stream: object) -> None:
        is_idle = stream == "idle"
        self.happens_ns = self.device.host_ns + (self.device.idle_stream_ns if is_idle else self.device.lag_ns)

    def query(self) -> bool:
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
    monkeypatch.setattr(timing, "host_now_ns", lambda: device.host_ns)
    return device


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def make_timeline(log) -> CudaTimeline:
    return CudaTimeline(log, torch.device("cuda", 0))


def test_an_event_is_written_in_host_time_once_the_device_has_passed_it(device, log):
    timeline = make_timeline(log)
    device.lag_ns = 3_000_000
    start = timeline.mark()
    device.host_ns += 1_000_000
    timeline.write(b"span", 0, start, timeline.mark())
    timeline.step_begins()
    assert log.records == [], "the device is still behind, and nobody waits for it"
    device.host_ns += 10_000_000
    timeline.step_begins()
    ((body, step, start_ns, end_ns),) = log.records
    assert (body, step) == (b"span", 0)
    assert start_ns == pytest.approx(1_003_000_000, abs=100)
    assert end_ns - start_ns == pytest.approx(1_000_000, abs=100)


def errors_over(steps: int, device: FakeDevice, log: MemoryLog) -> list[int]:
    """How far the time of one mark a step, every 250 ms, is from the truth."""
    timeline = make_timeline(log)
    true_ns = []
    for step in range(steps):
        device.host_ns += 250_000_000
        true_ns.append(device.host_ns + device.lag_ns)
        mark = timeline.mark()
        timeline.write(b"", step, mark, mark)
        timeline.step_begins()
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
    timeline = make_timeline(log)
    end_of_step = timeline.mark()
    first_ns = device.host_ns
    for step in range(5):
        begin = end_of_step
        for _ in range(10):
            device.host_ns += 1000
            timeline.mark()
        device.host_ns += 1_000_000
        end_of_step = timeline.mark()
        timeline.write(b"step", step, begin, end_of_step)
        timeline.step_begins()
    timeline.close()
    starts = [start_ns for _, _, start_ns, _ in log.records]
    ends = [end_ns for _, _, _, end_ns in log.records]
    assert starts[0] == pytest.approx(first_ns, abs=10)
    assert starts[1:] == pytest.approx(ends[:-1], abs=10)


def test_events_come_from_a_pool_that_stops_growing(device, log):
    timeline = make_timeline(log)
    made = []
    for step in range(20):
        for _ in range(10):
            mark = timeline.mark()
            timeline.write(b"", step, mark, mark)
        device.host_ns += 1_000_000
        timeline.step_begins()
        made.append(device.events_made)
    assert made[-1] == made[5]


def test_what_the_device_has_not_passed_at_the_end_is_left_out(device, log):
    timeline = make_timeline(log)
    device.lag_ns = 10**12
    mark = timeline.mark()
    timeline.write(b"", 0, mark, mark)
    timeline.close()
    assert log.records == []


def test_the_hosts_time_line_knows_its_times_at_once(log):
    timeline = HostTimeline(log)
    start = timeline.mark()
    timeline.write(b"", 0, start, timeline.mark())
    ((_, _, start_ns, end_ns),) = log.records
    assert 0 <= start_ns <= end_ns
    assert timeline.flags == Flag.NONE
