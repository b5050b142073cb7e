"""What it costs to sample the kernel's counters of TCP connections, and how long that holds up training.

    python benchmarks/links.py [--samples 50]

For a process with so many connections: the time of a sample, taken on the thread that would train, and the longest
time for which a thread that computes in Python had to stand still while the sampling thread took one (both run
under the GIL). The line "none" is the latter without samples: what the machine itself does.
"""

from __future__ import annotations

import argparse
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from instrumented_ddp.recording.tcp_stats import sample_connections

SENT_BYTES = 128 * 1024


@contextmanager
def connections(count: int) -> Iterator[None]:
    """Open so many connections over loopback that have carried enough to be sampled, both ends in this process."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        for _ in range(count // 2):
            sender = opened.enter_context(socket.create_connection(listener.getsockname()))
            receiver = opened.enter_context(listener.accept()[0])
            sender.sendall(bytes(SENT_BYTES))
            receiver.recv(SENT_BYTES, socket.MSG_WAITALL)
        yield


def time_sample_us(samples: int) -> float:
    """Return the median of a sample on this thread."""
    taken_ns = []
    for _ in range(samples):
        start_ns = time.perf_counter_ns()
        list(sample_connections())
        taken_ns.append(time.perf_counter_ns() - start_ns)
    return float(np.median(taken_ns)) / 1e3


def standstill_us(samples: int, *, sampling: bool) -> float:
    """Return the median over samples of the longest time between two turns of a loop on this thread."""
    longest_ns = []
    for _ in range(samples):
        thread = threading.Thread(target=(lambda: list(sample_connections())) if sampling else (lambda: None))
        thread.start()
        longest, before = 0, time.perf_counter_ns()
        end = before + 20_000_000
        while before < end:
            now = time.perf_counter_ns()
            longest, before = max(longest, now - before), now
        thread.join()
        longest_ns.append(longest)
    return float(np.median(longest_ns)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50)
    samples = parser.parse_args().samples
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    print("connections  a sample  longest standstill beside one")
    print(f"{'none':>11}  {'':8}  {standstill_us(samples, sampling=False):8.0f} us")
    for count in (8, 100, 1000):
        with connections(count):
            sample_us, still_us = time_sample_us(samples), standstill_us(samples, sampling=True)
            print(f"{count:>11}  {sample_us:5.0f} us  {still_us:8.0f} us", flush=True)


if __name__ == "__main__":
    main()
