"""Whether a process does something, as a watchdog samples it."""

from __future__ import annotations

import sys

import pytest

from instrumented_ddp.watchdog import local_rank as activity_module
from instrumented_ddp.watchdog.local_rank import Activity, UserCodeWatch

TICK_NS = 100_000_000


@pytest.fixture
def process(monkeypatch):
    """A process that stands still for 1 s of samples: what it uses and queues for is set here, as shares of a core."""
    shares = {"cpu": 0.0, "queue": 0.0}
    ticks = {"now": 0}

    def now_ns() -> int:
        ticks["now"] += 1
        return ticks["now"] * TICK_NS

    monkeypatch.setattr(activity_module, "host_now_ns", now_ns)
    monkeypatch.setattr(activity_module.time, "process_time_ns", lambda: int(shares["cpu"] * ticks["now"] * TICK_NS))
    monkeypatch.setattr(activity_module, "queued_ns", lambda _: int(shares["queue"] * ticks["now"] * TICK_NS))
    monkeypatch.setattr(activity_module, "cpu_ns_of_children", lambda _: 0)
    monkeypatch.setattr(activity_module, "bytes_read_and_written", lambda _: 0)
    return shares


@pytest.mark.parametrize(
    ("cpu", "queue", "is_working"), [(0.02, 0.01, False), (0.13, 0.5, True), (0.13, 0.0, False), (0.9, 0.0, True)]
)
def test_who_gets_little_of_a_crowded_core_works_all_the_same(process, cpu, queue, is_working):
    process.update(cpu=cpu, queue=queue)
    activity = Activity(0)
    for _ in range(10):
        activity.sample([sys._getframe()])
    assert activity.cpu_share() == pytest.approx(cpu, abs=0.02)
    assert activity.is_working() is is_working


IN_LOOP = 'Current thread 0x00007f (most recent call first):\n  File "/home/me/train.py", line 12 in main\n'
IN_DESTRUCTOR = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/usr/lib/python3.11/multiprocessing/process.py", line 149 in join\n'
    '  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1704 in __del__\n'
)


def test_a_main_thread_that_is_torn_out_of_its_stall_has_left_the_users_code():
    """Where it stood counts, and not the destructor that hangs then; in a stall of its own that is where it hangs."""
    watch = UserCodeWatch()
    assert not watch.has_left(IN_DESTRUCTOR, now_s=50, idle_s=2)
    assert not watch.has_left(IN_LOOP, now_s=100, idle_s=2)
    assert not watch.has_left(IN_LOOP, now_s=101, idle_s=3)
    assert watch.has_left(IN_DESTRUCTOR, now_s=110, idle_s=12)
    assert not watch.has_left(IN_DESTRUCTOR, now_s=120, idle_s=5), "it went on in between"
