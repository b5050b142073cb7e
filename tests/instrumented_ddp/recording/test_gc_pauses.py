"""Garbage collections that stop a rank are in its trace."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.recording.modes import ModeFollower
from instrumented_ddp.recording.recorder import GcPauses
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.recording_modes import OFF
from overlapscope.trace.schema import Kind, pack_body
from tests.synthetic import make_rank

US = 1_000


@pytest.fixture(autouse=True)
def _nothing_is_collected_unasked() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def log(tmp_path) -> Iterator[EventLogWriter]:
    log = make_rank(tmp_path, 0, world_size=1)
    yield log
    log.close()


def modes_of(log: EventLogWriter, *, every: int = 1) -> ModeFollower:
    return ModeFollower(log.path.parent, every=every, detail="buckets")


def the_clock_reads(monkeypatch, *times_us: int) -> None:
    readings = iter(times_us)
    monkeypatch.setattr("instrumented_ddp.recording.recorder.host_now_ns", lambda: next(readings) * US)


def pauses(log: EventLogWriter) -> list[list[int]]:
    """Step, generation, start and end in microseconds."""
    log.close()
    table = read_trace(log.path.parents[1]).pauses
    table[["start_ns", "end_ns"]] //= US
    return table[["step", "generation", "start_ns", "end_ns"]].to_numpy().tolist()


def test_a_collection_of_50_us_or_more_is_recorded_with_its_generation(log, monkeypatch):
    the_clock_reads(monkeypatch, 1000, 1050, 2000, 2049, 3000, 3700)
    watch = GcPauses(log, TrainingPosition(step=7), modes_of(log))
    for generation in (1, 0, 2):
        gc.collect(generation)
    watch.close()
    assert pauses(log) == [[7, 1, 1000, 1050], [7, 2, 3000, 3700]]


def test_while_recording_is_off_no_collection_is_recorded(log, monkeypatch):
    the_clock_reads(monkeypatch, 1000, 9000)
    watch = GcPauses(log, TrainingPosition(), modes_of(log, every=OFF))
    gc.collect()
    watch.close()
    assert pauses(log) == []


def test_nothing_is_watched_any_more_after_it_was_closed(log, monkeypatch):
    the_clock_reads(monkeypatch)
    before = list(gc.callbacks)
    watch = GcPauses(log, TrainingPosition(), modes_of(log))
    watch.close()
    watch.close()
    assert gc.callbacks == before
    gc.collect()
    assert pauses(log) == []


def test_a_forked_process_does_not_write_into_the_log_of_its_parent(log, monkeypatch):
    the_clock_reads(monkeypatch, 1000, 9000, 10_000, 19_000)
    watch = GcPauses(log, TrainingPosition(), modes_of(log))
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    watch.close()
    assert pauses(log) == []


def test_a_collection_while_the_log_grows_does_not_lock_up(log, monkeypatch):
    """A collection may begin at any allocation, also where the log's own lock is held."""
    the_clock_reads(monkeypatch, *range(0, 10_000_000, 100))
    allocate = os.posix_fallocate

    def collect_and_allocate(*where: int) -> None:
        gc.collect(0)
        allocate(*where)

    monkeypatch.setattr("os.posix_fallocate", collect_and_allocate)
    watch = GcPauses(log, TrainingPosition(), modes_of(log))
    for time_ns in range(EventLogWriter.chunk_slots + 1):
        log.append(pack_body(Kind.PLAN), 0, time_ns, time_ns)
    watch.close()
    assert len(pauses(log)) == 1


def trained(traces) -> Trace:
    model = DistributedDataParallel(nn.Linear(4, 2), trace=traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 4)).sum().backward()
        gc.collect()
        optimizer.step()
        gc.collect()
    assert model.recorder is not None
    model._session.close()
    return read_trace(traces)


def test_a_pause_belongs_to_the_step_whose_work_it_delays(traces):
    """After the optimizer that is the next step, although no forward has begun it."""
    before = list(gc.callbacks)
    found = trained(traces).pauses
    assert list(found["step"]) == [0, 1, 1, 2]
    assert set(found["generation"]) == {2}
    assert (found["start_ns"] < found["end_ns"]).all()
    assert gc.callbacks == before
