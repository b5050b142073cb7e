"""What /proc says of processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from instrumented_ddp.watchdog.process_state import (
    GONE,
    STOPPED,
    cpu_ns_of_children,
    memory_limit_bytes,
    queued_ns,
    read_process_state,
)
from overlapscope.diagnosis.process_state import has_process_ended


def until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_process_runs_is_stopped_and_is_gone():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            before = read_process_state(child.pid)
            assert before.state != GONE
            assert until(lambda: read_process_state(child.pid).cpu_ns > before.cpu_ns)
            child.send_signal(signal.SIGSTOP)
            assert until(lambda: read_process_state(child.pid).state in STOPPED)
        finally:
            child.kill()
        assert until(lambda: read_process_state(child.pid, before.start_ticks).state == GONE), (
            "although nobody has waited for it"
        )


def test_a_stopped_process_that_is_being_killed_has_ended_before_it_is_gone():
    stopped = ["T", *["0"] * 49]
    killed = [*stopped[:28], str(1 << (signal.SIGKILL - 1)), *stopped[29:]]
    exiting = ["R", *stopped[1:6], str(0x400004), *stopped[7:]]
    assert [has_process_ended(fields) for fields in (stopped, killed, exiting)] == [False, True, True]


def test_another_process_of_the_same_number_is_not_the_one():
    here = read_process_state(os.getpid())
    assert read_process_state(os.getpid(), here.start_ticks).state != GONE
    assert read_process_state(os.getpid(), here.start_ticks + 1).state == GONE


def test_the_work_of_children_is_seen():
    before_ns = cpu_ns_of_children(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            assert until(lambda: cpu_ns_of_children(os.getpid()) > before_ns)
        finally:
            child.kill()


def test_who_shares_a_core_queues_for_it():
    before_ns, cores = queued_ns(os.getpid()), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
            try:
                assert until(lambda: queued_ns(os.getpid()) > before_ns)
            finally:
                child.kill()
    finally:
        os.sched_setaffinity(0, cores)


def test_memory_has_a_limit():
    assert 0 < read_process_state(os.getpid()).resident_bytes < memory_limit_bytes()
