"""All-reduces that are made of sends and receives, beside gloo's own, over a link: how long, and what the link allows.

    python -m benchmarks.all_reduces [--ranks 2] [--link 1gbit] [--mb 1 4 16 64] [--strategies ring tree]

Each rank has a host of its own. What takes turns is drawn anew in each repetition. A time is from the moment at which
the last rank begins to that at which the last has the sum. ``link`` is the bytes that a rank sends in a ring,
``2 (N - 1) / N`` of the buffer, divided by the rate at which the link was found to carry bytes in both directions.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.quiet_machine import wait_until_quiet
from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.registry import STRATEGIES, resolve_strategy
from instrumented_ddp.strategies.wire import Wire
from overlapscope.lab.network import link as links
from overlapscope.lab.network.link import make_linked_hosts
from tests.cluster.hosts import entrance_to
from tests.cluster.ranks import Ranks, on_loopback
from tests.cluster.shaped_link import LINKS

GLOO: Final = "gloo"
MB: Final = 1024**2
LONGEST_WAIT_S: Final = 30
"""For a quiet machine."""


def times_of(names: Sequence[str], sizes_bytes: Sequence[int], repetitions: int) -> list[tuple[str, int, int, int]]:
    """Return what this rank sees, on the clock that all hosts share: name, size, begin and end of each all-reduce."""
    group = dist.group.WORLD
    assert group is not None
    # None where the backend has an all-reduce of its own.
    all_reduces = {name: None if name == GLOO else resolve_strategy(name).all_reduce for name in names}
    draw, seen = random.Random(0), []
    for size_bytes in sizes_bytes:
        buffer = torch.ones(size_bytes // 4)
        for repetition in range(repetitions + 1):  # the first one opens connections
            for name in draw.sample(list(names), len(names)):
                buffer.fill_(1)
                dist.barrier()
                begin_ns = time.monotonic_ns()
                all_reduce = all_reduces[name]
                if all_reduce is None:
                    dist.all_reduce(buffer)
                else:
                    all_reduce(buffer, Wire(group, range(group.size()), BucketSumRecorder(name, None, None)))
                end_ns = time.monotonic_ns()
                assert bool((buffer == group.size()).all()), name
                if repetition > 0:
                    seen.append((name, size_bytes, begin_ns, end_ns))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", choices=LINKS, default="1gbit")
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 4, 16, 64])
    summing = [name for name in STRATEGIES if resolve_strategy(name).all_reduce is not None]
    parser.add_argument("--strategies", nargs="+", choices=summing, default=["ring"])
    parser.add_argument("--repetitions", type=int, default=11)
    args = parser.parse_args()
    names = [GLOO, *args.strategies]
    sizes_bytes = [round(mb * MB) // 4 * 4 for mb in args.mb]

    if args.link == "loopback":
        rate = None
        with Ranks(args.ranks, on_loopback) as ranks:
            seen = ranks.call(times_of, names, sizes_bytes, args.repetitions, is_last=True)
    else:
        link = LINKS[args.link]
        with make_linked_hosts(link, args.ranks) as hosts:
            wait_until_quiet(LONGEST_WAIT_S)
            rate = links.measure_link([hosts.command(0), hosts.command(1)], hosts.address(0), link).bytes_per_s
            print(f"{args.link}: {rate / 1e6:.1f} MB/s each way, {args.ranks} ranks", flush=True)
            with Ranks(args.ranks, entrance_to(hosts)) as ranks:
                seen = ranks.call(times_of, names, sizes_bytes, args.repetitions, is_last=True)
    for failed in seen:
        if isinstance(failed, Exception):
            raise failed
    report(names, sizes_bytes, seen, rate)


def report(
    names: Sequence[str],
    sizes_bytes: Sequence[int],
    seen: Sequence[list[tuple[str, int, int, int]]],
    rate: float | None,
) -> None:
    """Print medians, and what they are of the link's time and of gloo's."""
    count = len(seen)
    begins = np.array([[begin for _, _, begin, _ in rank] for rank in seen]).max(axis=0)
    ends = np.array([[end for _, _, _, end in rank] for rank in seen]).max(axis=0)
    taken_ms = (ends - begins) / 1e6
    of = [(name, size) for name, size, _, _ in seen[0]]
    print(f"{'all-reduce':>16} {'MB':>7} {'median':>10} {'of link':>8} {'of gloo':>8}")
    for size in sizes_bytes:
        median_ms = {name: float(np.median(taken_ms[[one == (name, size) for one in of]])) for name in names}
        for name in names:
            ms = median_ms[name]
            of_link = f"{ms / (2 * (count - 1) / count * size / rate * 1e3):8.2f}" if rate else f"{'':8}"
            print(f"{name:>16} {size / MB:7.1f} {ms:7.1f} ms {of_link} {ms / median_ms[GLOO]:8.2f}")


if __name__ == "__main__":
    main()
