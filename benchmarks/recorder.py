"""What recording costs: nanoseconds per record, and step time recorded / not recorded.

    python benchmarks/recorder.py [--pairs 60]

1. A record in a tight loop: clock and append, caches warm.
2. What a gradient hook pays for recording in a real backward (400 parameters, 2 ranks), with caches as they are
   there: the time that passes between a hook before ours and a hook after ours, recording, less the same without.
   The hook stores a time; the record is packed later, in a loop as in 1, when the bucket has been launched.
3. Step time of 2 ranks over gloo, for three models and both levels of detail. One and the same model has its
   recording switched on and off (on off off on ...), so that both sides use the same memory: two instances of a
   model differ by 3 % for no other reason. A pair is a block of steps with recording and one without, a barrier
   before each step and the first step of a block not counted; the figure is the median over pairs, on both ranks,
   of the ratio of the blocks' wall (and CPU) times, with a 95 % bootstrap interval. The line "nothing" switches
   between off and off: what this method reads where there is nothing to be read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_convnet import make_resnet
from examples.train_gpt import GPT
from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.format import Kind, pack_body
from overlapscope.trace.writer import EventLog

BLOCK_STEPS = 6


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """400 parameters: 200 layers of width 64."""
    layers: list[nn.Module] = []
    for _ in range(200):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(32, 64)


def convnet() -> tuple[nn.Module, torch.Tensor]:
    """The ResNet of examples/train_convnet.py."""
    return make_resnet(32), torch.randn(32, 1, 8, 8)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """The GPT of examples/train_gpt.py, with a smaller batch."""
    return GPT(width=192, layers=6, heads=6, context=64), torch.randint(0, 256, (2, 64))


MODELS = {"mlp-400": mlp, "convnet": convnet, "transformer": transformer}


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

    def __init__(self, make: Callable[[], tuple[nn.Module, torch.Tensor]], trace: str) -> None:
        torch.manual_seed(0)
        module, self._inputs = make()
        self.model = DistributedDataParallel(module, trace=trace)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._recorder = self.model.recorder
        for _ in range(5):
            self.step()

    def switch(self, on: bool) -> None:
        """Record from here on, or no longer."""
        reducer, recorder = self.model.reducer, self._recorder if on else None
        self.model.recorder = reducer._recorder = reducer._lane._recorder = recorder
        reducer.remove_hooks()
        reducer._hooks = [
            parameter.register_post_accumulate_grad_hook(reducer._make_hook(index))
            for index, parameter in enumerate(reducer._parameters)
        ]
        for hook in self._recorder._optimizer_hooks:
            hook.remove()
        if on:
            self._recorder._optimizer_hooks = [
                register_optimizer_step_pre_hook(self._recorder._optimizer_begins),
                register_optimizer_step_post_hook(self._recorder._optimizer_ends),
            ]

    def step(self) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        self.model(self._inputs).float().square().mean().backward()
        self._optimizer.step()

    def close(self) -> None:
        """End the recording."""
        self._recorder.close()


def measure_hook_ns(recorded: bool, folder: str, steps: int = 60) -> float:
    """Median time between a hook before ours and one after it, over all parameters and steps."""
    torch.manual_seed(0)
    module, inputs = mlp()
    before, between = [0], []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: before.__setitem__(0, time.perf_counter_ns()))
    os.environ["OVERLAPSCOPE_DETAIL"] = "parameters"
    # One bucket, ready with the last gradient: all other hooks do nothing but count and record.
    model = DistributedDataParallel(module, bucket_cap_mb=1000, trace=folder if recorded else None)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: between.append(time.perf_counter_ns() - before[0]))
    for _ in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
    if model.recorder is not None:
        model.recorder.close()
    return statistics.median(between)


def measure_pairs(name: str, detail: str, pairs: int, folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Wall and CPU nanoseconds of blocks (recorded, not recorded), shape (pairs, 2) each."""
    os.environ["OVERLAPSCOPE_DETAIL"] = "buckets" if detail == "nothing" else detail
    switched = SwitchedModel(MODELS[name], f"{folder}/{name}-{detail}")
    wall, cpu = np.zeros((2, pairs, 2))
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            switched.switch(on=side == 0 and detail != "nothing")
            for number in range(BLOCK_STEPS):
                dist.barrier()
                wall_start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
                switched.step()
                if number:
                    wall[pair, side] += time.perf_counter_ns() - wall_start
                    cpu[pair, side] += time.process_time_ns() - cpu_start
    switched.close()
    return wall, cpu


def ratio_with_interval(times: np.ndarray) -> str:
    """Median over pairs of recorded / not recorded, with a bootstrap interval."""
    ratios = times[:, 0] / times[:, 1]
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


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
    for name in MODELS:
        for detail in ("nothing", "buckets", "parameters"):
            everyones: list[Any] = [None, None]
            dist.all_gather_object(everyones, measure_pairs(name, detail, pairs, folder))
            if rank == 0:
                wall, cpu = (np.concatenate(times) for times in zip(*everyones, strict=True))
                step_ms = np.median(wall[:, 1]) / 1e6 / (BLOCK_STEPS - 1)
                ratios = f"{ratio_with_interval(wall):>22} {ratio_with_interval(cpu):>22}"
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
