"""What recording costs: nanoseconds a record, and in a gradient hook.

    python benchmarks/recorder.py [--steps 60]

1. A record in a tight loop: clock and append, caches warm.
2. What a gradient hook pays for recording in a real backward (400 parameters, 2 ranks), with caches as they are
   there: the time that passes between a hook before ours and a hook after ours, recording, less the same without.
   The hook stores a time; the record is packed later, in a loop as in 1, when the bucket has been launched.

What a whole step costs is in benchmarks/step_time.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.autograd.graph import get_gradient_edge

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import make_mlp
from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.format import Kind, pack_body
from overlapscope.trace.writer import EventLog


def time_tight_loop(records: int = 500_000) -> float:
    """Nanoseconds of a clock reading and an append."""
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.log")
        body, append, now = pack_body(Kind.GRADIENT_READY), log.append, time.monotonic_ns
        start = time.perf_counter_ns()
        for _ in range(records):
            t = now()
            append(body, 7, t, t)
        taken_ns = time.perf_counter_ns() - start
        log.close()
    return taken_ns / records


def measure_hook_ns(recorded: bool, folder: str, steps: int) -> float:
    """Median time between a hook before ours and one after it, over all parameters and steps."""
    torch.manual_seed(0)
    workload = make_mlp()
    module = workload.module
    before, between = [0], []
    accumulators = [get_gradient_edge(parameter).node for parameter in module.parameters()]
    for accumulator in accumulators:
        accumulator.register_hook(lambda *_: before.__setitem__(0, time.perf_counter_ns()))
    os.environ["OVERLAPSCOPE_DETAIL"] = "parameters"
    # One bucket, ready with the last gradient: all other hooks do nothing but count and record.
    model = DistributedDataParallel(module, bucket_cap_mb=1000, trace=folder if recorded else None)
    for accumulator in accumulators:
        accumulator.register_hook(lambda *_: between.append(time.perf_counter_ns() - before[0]))
    for _ in range(steps):
        model.zero_grad()
        workload.loss_of(model(**workload.batch)).backward()
    if model.recorder is not None:
        model._session.close()
    return statistics.median(between)


def run_rank(rank: int, rendezvous: str, steps: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    plain_ns = measure_hook_ns(False, folder, steps)
    recorded_ns = measure_hook_ns(True, folder, steps)
    if rank == 0:
        cost_ns = recorded_ns - plain_ns
        print(f"recording in a hook   {cost_ns:6.0f} ns  ({recorded_ns:.0f} - {plain_ns:.0f})", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="with hooks that are timed (%(default)s)")
    args = parser.parse_args()
    print(f"record in a tight loop{time_tight_loop():6.0f} ns", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (f"{folder}/rendezvous", args.steps, folder), nprocs=2)


if __name__ == "__main__":
    main()
