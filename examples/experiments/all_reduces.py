"""One rank of a series of all-reduces without a training, timed like ``overlapscope calibrate``."""

from __future__ import annotations

import torch.distributed as dist
from meeting import Task

from instrumented_ddp.calibrate import AllReduceTimer


def main() -> None:
    """Time all-reduces of some sizes, and store the median times of those that are launched together."""
    task = Task.read()
    device = task.device()
    task.join()
    group = dist.group.WORLD
    assert group is not None
    sweep = AllReduceTimer(group, device)
    series = task.settings["series"]  # bytes of each, and how many are launched together
    sweep.measure(1024)  # warm up: connections are made, and threads started
    times_ns = [sweep.measure(size_bytes, at_once).time_ns for size_bytes, at_once in series]
    task.finish({"times_ns": times_ns})


if __name__ == "__main__":
    main()
