"""What has ended is told, once, whatever else hangs; what has not is never waited for by who asks."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from instrumented_ddp.collectives import completion
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.recording.records import BucketCollective, make_bitmap_records
from instrumented_ddp.recording.timing import HostTimer
from overlapscope.trace.schema import Flag

PATIENCE_S = 30
HOST = torch.device("cpu")


class Told:
    """Takes note of ends; also a bucket, which a thread waits for if ``is_waited_for``."""

    def __init__(self, *, is_waited_for: bool = True) -> None:
        self.running_ns = 0
        self.is_waited_for = is_waited_for
        self.watched: object = None
        self.times_ns: list[int] = []
        self.failed: list[bool] = []
        self._is_told = threading.Event()

    def __call__(self, now_ns: int, failed: bool) -> None:
        self.times_ns.append(now_ns)
        self.failed.append(failed)
        self._is_told.set()

    ended = __call__

    def wait(self) -> bool:
        return self._is_told.wait(PATIENCE_S)


def fails(error: Exception) -> None:
    raise error


@pytest.fixture
def watch() -> Iterator[CompletionWatch]:
    watch = CompletionWatch(fails)
    yield watch
    watch.close()


def add(watch: CompletionWatch, work: Any, *, is_bucket: bool = False) -> Told:
    told = Told()
    if is_bucket:
        watch.add_bucket(work, told)
    else:
        watch.add(work, HOST, told)
    return told


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "never came to be"
        time.sleep(0.001)


def test_an_end_is_told_when_it_comes_and_not_before(watch):
    future: Future[int] = Future()
    told = add(watch, future, is_bucket=True)
    watch.poll()
    assert told.times_ns == []
    before_ns = time.monotonic_ns()
    future.set_result(1)
    assert told.wait()
    assert told.times_ns[0] >= before_ns
    assert told.failed == [False]


def test_all_who_want_to_know_are_told(watch):
    future: Future[int] = Future()
    bucket, entry = Told(), Told()
    watch.add_bucket(future, bucket, entry)
    future.set_result(1)
    assert entry.wait()
    assert bucket.times_ns == entry.times_ns


def test_what_has_ended_is_let_go_of_also_behind_one_that_never_does(watch):
    class Receive:
        """As gloo's, which says that it is complete to who waits for it, and to nobody else."""

        def __init__(self, is_over):
            self.is_completed = lambda: is_over

    never = Receive(is_over=False)
    add(watch, never)
    ended = [weakref.ref(work) for work in [Receive(is_over=True) for _ in range(3)] if add(watch, work)]
    watch.poll()
    gc.collect()
    assert [work() for work in ended] == [None] * 3


def test_a_failure_is_told_as_one(watch):
    future: Future[int] = Future()
    told = add(watch, future, is_bucket=True)
    future.set_exception(RuntimeError("Connection closed by peer"))
    assert told.wait()
    assert told.failed == [True]


def test_buckets_are_seen_to_end_while_others_hang(watch):
    hanging = [add(watch, Future()) for _ in range(4)] + [add(watch, Future(), is_bucket=True)]
    for _ in range(3):
        bucket: Future[int] = Future()
        told = add(watch, bucket, is_bucket=True)
        bucket.set_result(1)
        assert told.wait()
    assert all(told.times_ns == [] for told in hanging)


def test_a_bucket_that_no_thread_waits_for_is_told_by_who_passes_by_and_says_until_when_it_ran(watch):
    future: Future[int] = Future()
    told = Told(is_waited_for=False)
    watch.add_bucket(future, told)
    before_ns = time.monotonic_ns()
    watch.poll_buckets()
    assert before_ns <= told.running_ns <= time.monotonic_ns()
    future.set_result(1)
    running_ns, passing_ns = told.running_ns, time.monotonic_ns()
    assert told.times_ns == []
    watch.poll_buckets()
    assert told.failed == [False]
    assert told.times_ns[0] >= passing_ns
    assert told.running_ns == running_ns
    assert watch._threads == []


def test_a_bucket_that_ends_right_after_the_look_was_seen_running_before_it(watch, monkeypatch):
    # A moment between two instructions can't be met on purpose with real work, so clock and work are played here.
    clock_ns = [100]
    monkeypatch.setattr(completion, "host_now_ns", lambda: clock_ns[0])

    class EndsRightAfterTheLook:
        def is_completed(self) -> bool:
            clock_ns[0] += 1_000_000
            return False

    told = Told(is_waited_for=False)
    watch.add_bucket(EndsRightAfterTheLook(), told)
    watch.poll_buckets()
    assert told.running_ns == 100


def test_a_thread_waits_for_a_bucket_that_still_runs_once_the_training_waits(watch):
    ended, runs = Future(), Future()
    told_of_ended, told_of_running = Told(is_waited_for=False), Told(is_waited_for=False)
    watch.add_bucket(ended, told_of_ended)
    watch.add_bucket(runs, told_of_running)
    ended.set_result(1)
    watch.poll_buckets(waits=True)
    assert (told_of_ended.is_waited_for, told_of_running.is_waited_for) == (False, True)
    runs.set_result(1)
    assert told_of_running.wait()


def test_what_the_training_has_waited_for_is_told_once(watch):
    future: Future[int] = Future()
    bucket, entry = Told(is_waited_for=False), Told()
    watch.add_bucket(future, bucket, entry)
    future.set_result(1)
    watch.waited(bucket)
    watch.waited(bucket)
    watch.poll()
    assert bucket.failed == entry.failed == [False]
    assert bucket.times_ns == entry.times_ns


def test_what_is_no_bucket_is_told_by_who_looks_and_wakes_no_thread(watch):
    first, second = Future(), Future()
    told = [add(watch, future) for future in (first, second)]
    first.set_result(1)
    second.set_result(1)
    assert [one.failed for one in told] == [[], []]
    assert watch._threads == []
    watch.poll_oldest()
    assert [one.failed for one in told] == [[False], [False]]


def test_the_quick_look_ends_at_the_oldest_that_runs_and_the_other_tells_all(watch):
    hangs, ended, fails = Future(), Future(), Future()
    told = [add(watch, future) for future in (hangs, ended, fails)]
    ended.set_result(1)
    fails.set_exception(RuntimeError("Connection closed by peer"))
    watch.poll_oldest()
    assert [one.failed for one in told] == [[], [], []]
    watch.run()
    watch.run()
    assert [one.failed for one in told] == [[], [False], [True]]
    hangs.set_result(1)
    watch.poll_oldest()
    assert [one.failed for one in told] == [[False], [False], [True]]


def test_what_has_been_told_is_let_go_of(watch):
    future: Future[torch.Tensor] = Future()
    result = torch.ones(1)
    gone = weakref.ref(result)
    add(watch, future)
    future.set_result(result)
    del future, result
    watch.run()
    gc.collect()
    assert gone() is None


def test_where_buckets_hold_both_threads_a_look_tells_what_has_ended(watch):
    for _ in range(2):
        add(watch, Future(), is_bucket=True)
    until(watch._launched.empty)
    bucket: Future[int] = Future()
    told = add(watch, bucket, is_bucket=True)
    bucket.set_result(1)
    watch.poll()
    assert told.failed == [False]


def test_what_goes_wrong_when_somebody_is_told_is_said_and_the_others_are_told_all_the_same():
    errors: list[Exception] = []
    watch = CompletionWatch(errors.append)

    def tell(now_ns: int, failed: bool) -> None:
        raise OSError("no space left on device")

    ended, told = Future(), Told()
    watch.add(ended, HOST, tell, told)
    ended.set_result(1)
    watch.poll()
    assert [str(error) for error in errors] == ["no space left on device"]
    assert told.failed == [False]
    watch.close()


class SendOfGloo(dist.Work):
    """Waiting for it takes the completion away from the user, who then waits for ever; and it has no future."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        pytest.fail("somebody has waited in the user's place")


def test_what_has_no_future_is_looked_at_and_never_waited_for(watch):
    work = SendOfGloo()
    told = add(watch, work)
    watch.poll()
    assert told.times_ns == []
    work.is_over = True
    watch.poll()
    assert told.failed == [False]


def test_who_closes_does_not_wait_for_what_hangs_and_writes_nothing_afterwards():
    watch = CompletionWatch(fails)
    ended, hangs = Future(), Future()
    told_of_ended, told_of_hanging = add(watch, ended), add(watch, hangs, is_bucket=True)
    ended.set_result(1)
    watch.close()
    hangs.set_result(1)
    until(lambda: not any(thread.is_alive() for thread in watch._threads))
    assert len(told_of_ended.times_ns) == 1
    assert told_of_hanging.times_ns == []


class MemoryLog:
    def __init__(self) -> None:
        self.records: list[tuple[int, int, int]] = []

    def append(self, _: bytes, __: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        self.records.append((start_ns, end_ns, end_uncertainty_ns))


def test_the_end_of_a_bucket_is_what_is_heard_first_and_carries_when_it_last_ran():
    log = MemoryLog()
    records = make_bitmap_records(HostTimer(log).flags | Flag.NONE, 0, 8, "float32")
    collective = BucketCollective(records, 3, log)
    collective.launch_ns, collective.running_ns = 100, 400
    collective.ended(500, failed=False)
    collective.ended(900, failed=False)
    assert log.records == [(100, 500, 100)]


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("latest_ms", [1, 20])
def test_the_end_of_a_short_bucket_of_a_light_step_is_only_polled_and_its_record_says_so(latest_ms, is_full):
    bodies: list[bytes] = []
    log = MemoryLog()
    log.append = lambda body, *_: bodies.append(body)
    records = make_bitmap_records(HostTimer(log).flags | Flag.NONE, 0, 8, "float32")
    for _ in range(2):
        collective = BucketCollective(records, 3, log, is_full=is_full)
        collective.ended(latest_ms * 1_000_000, failed=False)
    is_polled = not is_full and latest_ms < 5
    assert collective.is_waited_for != is_polled
    assert bodies[-1] == (records.collective_polled if is_polled else records.collective_bounds)


def test_a_bucket_that_fails_did_not_complete():
    log = MemoryLog()
    collective = BucketCollective(make_bitmap_records(Flag.NONE, 0, 8, "float32"), 3, log)
    collective.ended(500, failed=True)
    assert log.records == []


def test_a_work_of_a_process_group_that_is_written_in_python_is_seen_to_end(watch):
    future: Future[list[torch.Tensor]] = Future()
    told = add(watch, _create_work_from_future(future), is_bucket=True)
    future.set_result([torch.ones(1)])
    assert told.wait()
