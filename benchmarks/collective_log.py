"""What the collective log costs: microseconds of each collective, written down / not written down, in pairs.

    python benchmarks/collective_log.py [--pairs 15]

One process in a group of its own over gloo launches small collectives in a loop, and waits for each, as a training
script does with those of its own. There is nothing to communicate, so the difference is the log: the look at the
caller's line and at the names of tensors, the entry, and the thread that sees the end. The watchdog is off
(``benchmarks/watchdog.py`` is about it).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.collectives.roles import CollectiveRole, collective_context

COLLECTIVES = 2000


def reduce_bucket(buffer: torch.Tensor) -> None:
    """Reduce as our reducer does, which says what it launches."""
    with collective_context(CollectiveRole(role="bucket", bucket=0)):
        dist.group.WORLD.allreduce([buffer], dist.AllreduceOptions()).wait()


def us_of_each(launch: Callable[[], object]) -> float:
    """Measure the microseconds of one, in a loop."""
    start_ns = time.perf_counter_ns()
    for _ in range(COLLECTIVES):
        launch()
    return (time.perf_counter_ns() - start_ns) / COLLECTIVES / 1000


def fail(error: Exception) -> None:
    """Raise it: what the log lacks makes it cheaper."""
    raise error


def us_when_logged(launch: Callable[[], object]) -> float:
    """Measure the same with a log, which is new and knows nothing yet."""
    with tempfile.TemporaryDirectory() as folder:
        log = CollectiveRecorder(Path(folder, "rank_0"), 0, TrainingPosition(), on_error=fail)
        try:
            return us_of_each(launch)
        finally:
            log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="of loops, with and without a log (default: 15)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = torch.zeros(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        kinds: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(small),
            "broadcast": lambda: dist.broadcast(small, 0),
            "barrier": dist.barrier,
            "a bucket": lambda: reduce_bucket(small),
        }
        for name, launch in kinds.items():
            pairs = np.array([(us_when_logged(launch), us_of_each(launch)) for _ in range(args.pairs)])
            logged, plain = np.median(pairs, axis=0)
            cost = np.median(pairs[:, 0] - pairs[:, 1])
            print(f"{name:12} without {plain:6.1f} us   with {logged:6.1f} us   the log {cost:5.1f} us")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
