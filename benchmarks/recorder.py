"""What recording costs: nanoseconds per record, and step time recorded / not recorded.

    python benchmarks/recorder.py [--pairs 60]

1. A record in a tight loop: clock and append, caches warm.
2. What a gradient hook pays for recording in a real backward (400 parameters, 2 ranks), with caches as they are
   there: the time that passes between a hook before ours and a hook after ours, recording, less the same without.
   The hook stores a time; the record is packed later, in a loop as in 1, when the bucket has been launched.
3. Step time of 2 ranks over gloo, for three models and both levels of detail. One and the same model has its
   recording switched on and off, so that both sides use the same memory: two instances of a model differ by 3 % for
   no other reason. benchmarks/pairing.py says how a block of steps with recording and one without are compared. The
   line "nothing" switches between off and off: what this method reads where there is nothing to be read.

benchmarks/step_time.py compares with stock DDP instead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import SMALL_MODELS, Workload, make_mlp
from benchmarks.pairing import Block, BlockTimes, Side, measure_pairs, ratio_of
from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.format import Kind, pack_body
from overlapscope.trace.writer import EventLog

BLOCK = Block(steps=5)


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


class SwitchedModel:
    """A recorded model whose recording can be switched off and on again: its hooks, and who holds the recorder."""

    def __init__(self, make: Callable[[], Workload], trace: str) -> None:
        torch.manual_seed(0)
        self._workload = make()
        self.model = DistributedDataParallel(self._workload.module, trace=trace)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._recorder = self.model.recorder
        for _ in range(5):
            self.step()

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Record from here on, or no longer."""
        reducer = self.model.reducer
        self.model.recorder = reducer._recorder = recorder = self._recorder if on else None
        for lane in reducer._lanes.values():
            lane._recorder = recorder
        reducer._remove_autograd_hooks()
        reducer.register_hooks()
        for hook in self._recorder._optimizer_hooks:
            hook.remove()
        if on:
            self._recorder._optimizer_hooks = [
                register_optimizer_step_pre_hook(self._recorder._optimizer_begins),
                register_optimizer_step_post_hook(self._recorder._optimizer_ends),
            ]
        yield

    def step(self) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        self._workload.loss_of(self.model(**self._workload.batch)).backward()
        self._optimizer.step()

    def close(self) -> None:
        """End the recording."""
        self._recorder.close()


def measure_hook_ns(recorded: bool, folder: str, steps: int = 60) -> float:
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
        model.recorder.close()
    return statistics.median(between)


def measure_switching(name: str, detail: str, pairs: int, folder: str) -> BlockTimes:
    """Times of blocks recorded and not recorded."""
    os.environ["OVERLAPSCOPE_DETAIL"] = "buckets" if detail == "nothing" else detail
    model = SwitchedModel(SMALL_MODELS[name], f"{folder}/{name}-{detail}")
    on = Side(model.step, around=partial(model.switched, detail != "nothing"))
    off = Side(model.step, around=partial(model.switched, False))
    times = measure_pairs({detail: (on, off)}, BLOCK, most_pairs=pairs)[detail]
    model.close()
    return times


def run_rank(rank: int, rendezvous: str, pairs: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    plain_ns = measure_hook_ns(False, folder)
    recorded_ns = measure_hook_ns(True, f"{folder}/hooks")
    if rank == 0:
        print(
            f"recording in a hook   {recorded_ns - plain_ns:6.0f} ns  ({recorded_ns:.0f} - {plain_ns:.0f})", flush=True
        )
        print(f"\nstep time recorded / not recorded, {pairs} pairs of blocks on 2 ranks, median [95 % interval]")
        print(f"{'model':12} {'detail':11} {'step ms':>8} {'wall':>22} {'CPU':>22}", flush=True)
    for name in SMALL_MODELS:
        for detail in ("nothing", "buckets", "parameters"):
            times = measure_switching(name, detail, pairs, folder)
            if rank == 0:
                step_ms = np.median(times.wall_ns[:, 1]) / 1e6 / BLOCK.steps
                ratios = f"{ratio_of([times.wall_ns])!s:>22} {ratio_of([times.cpu_ns])!s:>22}"
                print(f"{name:12} {detail:11} {step_ms:8.1f} {ratios}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks per model and level of detail")
    args = parser.parse_args()
    print(f"record in a tight loop{time_tight_loop():6.0f} ns", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (f"{folder}/rendezvous", args.pairs, folder), nprocs=2)


if __name__ == "__main__":
    main()
