"""One rank of a training that takes its CPU time, recorded if the environment says so, for benchmarks/step_time.py.

    RANK=0 WORLD_SIZE=2 python -m benchmarks.timed_training FOLDER WRAPPER MODEL STEPS CORE

All its threads stay on one core. Writes FOLDER/RANK.json, a ``Timed``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import instrumented_ddp
from benchmarks.models import KNOWN_MODELS, SMALL_MODELS, TINY_MODELS, training_step
from instrumented_ddp.native import IS_NATIVE

MODELS: Final = TINY_MODELS | SMALL_MODELS | KNOWN_MODELS
WRAPPERS: Final = {"stock": DistributedDataParallel, "ours": instrumented_ddp.DistributedDataParallel}
WARM_UP_STEPS: Final = 10
_TASKS: Final = Path("/proc/self/task")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """CPU time of a step, as one rank saw it: means over steps."""

    cpu_ns: float
    """Of the process with all its threads."""
    thread_ns: dict[str, float]
    """By name of thread."""
    thread_count: int
    is_native: bool
    """Whether what records is in C."""

    @classmethod
    def read(cls, path: Path) -> Timed:
        """Read it from the file that a rank has written."""
        return cls(**json.loads(path.read_text()))


def cpu_ns_by_thread() -> dict[int, int]:
    """Return the CPU time until now of each thread of this process, by its id."""
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) for task in _TASKS.iterdir()}


def name_of(thread: int) -> str:
    """Return what Python calls a thread, or else the kernel."""
    for known in threading.enumerate():
        if known.native_id == thread:
            return known.name.removeprefix("overlapscope-")
    return (_TASKS / str(thread) / "comm").read_text().strip()


def main() -> None:
    folder, wrapper, model, steps, core = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:6])
    for thread in _TASKS.iterdir():  # those that are started later on inherit it
        os.sched_setaffinity(int(thread.name), {core})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload = MODELS[model]()
    step = training_step(workload, WRAPPERS[wrapper](workload.module))
    for _ in range(WARM_UP_STEPS):
        step()
    # The collector goes on as in any training, but need not look through all that has been imported.
    gc.collect()
    gc.freeze()
    dist.barrier()
    threads_before_ns, cpu_begin_ns = cpu_ns_by_thread(), time.process_time_ns()
    for _ in range(steps):
        step()
    cpu_ns, threads_ns = time.process_time_ns() - cpu_begin_ns, cpu_ns_by_thread()
    thread_ns: dict[str, float] = defaultdict(float)
    for thread_id, until_ns in threads_ns.items():
        thread_ns[name_of(thread_id)] += (until_ns - threads_before_ns.get(thread_id, 0)) / steps
    timed = Timed(
        cpu_ns=cpu_ns / steps,
        thread_ns=dict(thread_ns),
        thread_count=len(threads_ns),
        is_native=IS_NATIVE,
    )
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(asdict(timed)))
    dist.barrier()
    # Before its process group: stock's reducer holds on to that, and would end it with the GIL, for which gloo's thread
    # may be waiting to end its newest work.
    del step
    dist.destroy_process_group()
    # A thread of gloo that asks for the GIL of an interpreter that is ending would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
