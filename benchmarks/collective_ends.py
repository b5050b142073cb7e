"""How late are the ends that we record for gloo's collectives, and how late would other signals be?

    OMP_NUM_THREADS=1 python benchmarks/collective_ends.py [--steps 20]

Trains examples/train_gpt.py's model on two ranks under torch.profiler, whose ``gloo:all_reduce`` events are timed in
C++ on gloo's own thread, and compares with them, per all-reduce of rank 0:

recorded   the end in our trace: a thread that waits for the work
callback   a Python callback on the work's future, which runs on gloo's thread as soon as it gets the GIL
look       ``is_completed()`` asked in every gradient hook

Prints percentiles of the lateness in milliseconds. Lateness below zero means before the profiler's event ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_gpt import GPT, draw_batch, read_sources
from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks

WARM_UP_STEPS = 5


class Signals:
    """The other two signals, taken beside ours, in unix nanoseconds."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.callback_ns: list[int] = []
        self.look_ns: list[int] = []
        self._running: list[tuple[dist.Work, int]] = []
        launch = dist.ProcessGroup.allreduce

        def allreduce(*args: object) -> dist.Work:
            work = launch(*args)
            number = len(self.callback_ns)
            self.callback_ns.append(0)
            self.look_ns.append(0)
            self._running.append((work, number))
            work.get_future().add_done_callback(lambda _: self.callback_ns.__setitem__(number, time.time_ns()))
            return work

        dist.ProcessGroup.allreduce = allreduce
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.look)

    def look(self, _: object = None) -> None:
        """Note what has completed since the last look."""
        now_ns = time.time_ns()
        for work, number in list(self._running):
            if work.is_completed():
                self.look_ns[number] = now_ns
                self._running.remove((work, number))


def report_of(steps: int, folder: str) -> str | None:
    """Train on one rank; what rank 0 has to say."""
    rank = dist.get_rank()
    model = DistributedDataParallel(
        GPT(width=192, layers=6, heads=6, context=64), bucket_cap_mb=1, trace=f"{folder}/traces"
    )
    signals = Signals(model)
    optimizer = torch.optim.AdamW(model.parameters())
    text, generator = read_sources(), torch.Generator().manual_seed(rank)

    def step() -> None:
        inputs, targets = draw_batch(text, 8, 64, generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        signals.look()
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    unix_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
    model._session.close()
    if rank != 0:
        return None
    profiler.export_chrome_trace(f"{folder}/profile.json")
    profiled = json.loads(Path(f"{folder}/profile.json").read_text())
    events = [event for event in profiled["traceEvents"] if event.get("name") == "gloo:all_reduce"]
    events.sort(key=lambda event: event["ts"])
    true_ns = np.array([round((e["ts"] + e["dur"]) * 1000) for e in events]) + profiled["baseTimeNanoseconds"]
    reduced = read_trace(f"{folder}/traces").collectives.query("rank == 0 and op == 'all_reduce'")
    recorded_ns = reduced["end_ns"].to_numpy(dtype=np.int64) + unix_minus_monotonic_ns
    lines = [f"{len(true_ns)} all-reduces; lateness in ms", f"{'':10} {'p5':>8} {'p50':>8} {'p90':>8} {'max':>8}"]
    signal_ns = {"recorded": recorded_ns, "callback": signals.callback_ns, "look": signals.look_ns}
    for name, every_end_ns in signal_ns.items():
        ends_ns = np.array(every_end_ns)[-len(true_ns) :]  # without the warm-up's
        lateness_ms = (ends_ns - true_ns)[ends_ns > 0] / 1e6
        lines.append(f"{name:10} " + " ".join(f"{np.percentile(lateness_ms, p):8.3f}" for p in (5, 50, 90, 100)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for report in run_ranks(report_of, 2, args.steps, folder):
            if isinstance(report, Exception):
                raise report
            if report:
                print(report)


if __name__ == "__main__":
    main()
