"""What a gradient, a bucket, a step and an all-gather cost the training thread, in microseconds, and a record in ns.

    python -m benchmarks.recorder [--rounds 5] [--steps 60] [--checks]

One process trains small layers alone (gloo has nobody to talk to), 600 parameters in one bucket, the same in 30, and 2
parameters in one. CPU time of the training thread in forward, backward and optimizer, over that of the bare module:

    a step       with 2 parameters
    a gradient   what 598 more add
    a bucket     what 29 more add

A bare hook, which does nothing, is what Python itself costs; stock's DDP has its hooks in C++. The other threads are
those that a recording brings along, with 30 buckets a step.

Two processes train 30 layers that ``fully_shard`` shards, each by itself. An all-gather is a 30th of what recording
adds to the training thread's forward, in which each layer is gathered once.

Every way has new processes, and takes turns with the others; medians over rounds, with 90 % intervals from five rounds
on. In a sample, one step in ten is recorded in full. What says so is recorded by the twins
in Python (OVERLAPSCOPE_NATIVE=0), the rest by the native code. Last, a record in a tight loop with caches warm, a
sample of the machine, of which there is one a second at most, and a tensor that the script reduces by itself. What a
real step costs is in ``benchmarks.step_time``.

With --checks, only recorded trainings are timed: as they are, and without the looks for NaN, without the search for
gradients that were not reduced, or without the account of what the loop does. What each costs is the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard

import instrumented_ddp
from benchmarks.medians import format_interval, median_with_ci
from instrumented_ddp import native
from instrumented_ddp.collectives.user_reductions import GradientReader, UserReductions
from instrumented_ddp.machine.sampler import MachineSampler
from instrumented_ddp.native import NATIVE_VARIABLE
from instrumented_ddp.recording.coverage import ReductionCoverage
from instrumented_ddp.recording.finite_check import GradientCheck
from instrumented_ddp.recording.loop_facts import ModelLoop
from instrumented_ddp.recording.timing import make_timer
from overlapscope.trace.environment import SAMPLE_VARIABLE
from overlapscope.trace.event_log import EventLogWriter, RecordStore
from overlapscope.trace.schema import Kind, pack_body
from tests.cluster.processes import Program, run_together
from tests.fake_nvml.playing import play_gpu
from tests.instrumented_ddp.device_stub import DEVICE, Stub, compile_stub, play_torch

TIME_LIMIT_S: Final = 300
TABLE_WIDTH: Final = 140
BARE: Final = "no DDP"
IN_PYTHON: Final = " in Python"
IN_SAMPLE: Final = " in a sample"
WAYS: Final = (
    *(BARE, "a bare hook"),
    *("stock", "stock, recorded", "stock, recorded in a sample", "stock, recorded in Python"),
    *("ours", "ours in Python", "ours, recorded", "ours, recorded in a sample", "ours, recorded in Python"),
)
CHECKS: Final[dict[str, tuple[type, tuple[str, ...]]]] = {
    " without looks for NaN": (GradientCheck, ("on_forward_start", "on_launch", "on_reduced")),
    " without coverage": (ReductionCoverage, ("on_backward", "on_gradients_reduced", "take_unreduced_update")),
    " without loop facts": (ModelLoop, ("on_backward", "on_gradients_reduced", "on_update")),
}
"""What is left out, in ways that end so: methods of a class that do nothing."""
CHECKED_WAYS: Final = (
    BARE,
    *(f"{whose}, recorded{without}" for whose in ("stock", "ours") for without in ("", *CHECKS)),
)
SHARDED_WAYS: Final = ("fully_shard", "fully_shard, recorded", "fully_shard, recorded in Python")
SHAPES: Final = {"many": (300, 1000.0), "buckets": (300, 0.0103), "few": (1, 1000.0)}
"""Layers of 1,088 bytes, and ``bucket_cap_mb``."""
MORE_GRADIENTS: Final = 598
BUCKETS: Final = 30
SHARDED_LAYERS: Final = 30
WARM_UP_STEPS: Final = 10

Times = dict[str, tuple[float, float]]
"""``step_us`` by shape."""


def wrapped(module: nn.Module, way: str, cap_mb: float, folder: Path) -> nn.Module:
    """Return the module, as it is trained in this way."""
    if way == "a bare hook":
        for parameter in module.parameters():
            node = get_gradient_edge(parameter).node
            node.register_hook(lambda *_: None)
            parameter.node = node  # type: ignore[attr-defined] # which nothing else keeps
    if way.startswith("stock"):
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    if way.startswith("ours"):
        trace = folder / "traces" if "recorded" in way else None
        return instrumented_ddp.DistributedDataParallel(module, bucket_cap_mb=cap_mb, trace=trace)
    return module


def step_us(model: nn.Module, steps: int) -> tuple[float, float]:
    """Measure the CPU time of a step, microseconds: of this thread, the median; of all others, the mean."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batch, taken_ns = torch.randn(4, 16), []
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            others_ns = time.process_time_ns() - time.thread_time_ns()
        begin_ns = time.thread_time_ns()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken_ns.append(time.thread_time_ns() - begin_ns)
    others_ns = time.process_time_ns() - time.thread_time_ns() - others_ns
    return statistics.median(taken_ns[WARM_UP_STEPS:]) / 1000, others_ns / steps / 1000


def forward_us(steps: int) -> float:
    """Measure the median CPU time of this thread in the forward of sharded layers, microseconds."""
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(SHARDED_LAYERS)])
    for layer in layers:
        fully_shard(layer)
    model = fully_shard(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batch, taken_ns = torch.randn(4, 16), []
    for _ in range(WARM_UP_STEPS + steps):
        begin_ns = time.thread_time_ns()
        output = model(batch)
        taken_ns.append(time.thread_time_ns() - begin_ns)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return statistics.median(taken_ns[WARM_UP_STEPS:]) / 1000


def measure_sharded(way: str, steps: int) -> float:
    """Measure ``forward_us`` as one of two ranks."""
    torch.set_num_threads(1)
    rank, store = int(os.environ["RANK"]), os.environ["STORE"]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    if "recorded" in way:
        instrumented_ddp.attach(f"{store}-traces")
    taken_us = forward_us(steps)
    dist.barrier()
    dist.destroy_process_group()
    return taken_us


def measure(way: str, steps: int) -> Times:
    """Measure ``step_us`` of each shape, in this process."""
    torch.set_num_threads(1)
    for without, (owner, methods) in CHECKS.items():
        for method in methods if way.endswith(without) else ():
            setattr(owner, method, lambda *_, **__: None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
        if way.startswith("stock, recorded"):
            instrumented_ddp.attach(folder / "traces")
        measured = {}
        for shape, (layers, cap_mb) in SHAPES.items():
            module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
            measured[shape] = step_us(wrapped(module, way, cap_mb, folder), steps)
        dist.destroy_process_group()
    return measured


def measured_apart(way: str, steps: int) -> Times:
    """Run ``measure`` in a new process."""
    (printed,) = run_together([program(way, steps)], TIME_LIMIT_S)
    measured: Times = json.loads(printed.splitlines()[-1])
    return measured


def sharded_apart(way: str, steps: int) -> float:
    """Run ``measure_sharded`` in two new processes, of which the first one counts."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [program(way, steps, RANK=str(rank), STORE=f"{folder}/store") for rank in range(2)]
        return float(run_together(ranks, TIME_LIMIT_S)[0].splitlines()[-1])


def program(way: str, steps: int, **variables: str) -> Program:
    """Return the command of this program, for one way."""
    environment = os.environ | {NATIVE_VARIABLE: "0" if way.endswith(IN_PYTHON) else "1"} | variables
    environment |= {SAMPLE_VARIABLE: "10"} if way.endswith(IN_SAMPLE) else {}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    return Program(["-m", "benchmarks.recorder", "--way", way, "--steps", str(steps)], environment)


def table_of(rounds: Sequence[dict[str, Times]], ways: Sequence[str]) -> Table:
    """Tabulate what each way costs."""

    def over_rounds(cost: Callable[[dict[str, Times]], float]) -> str:
        return format_interval(median_with_ci([cost(measured) for measured in rounds]), 2)

    table = Table("", "a gradient", "a bucket", "a step", "other threads a step", box=SIMPLE_HEAD, title="microseconds")
    for way in ways[1:]:

        def more(measured: dict[str, Times], shape: str, way: str = way) -> float:
            return measured[way][shape][0] - measured[BARE][shape][0]

        table.add_row(
            way,
            over_rounds(lambda each, more=more: (more(each, "many") - more(each, "few")) / MORE_GRADIENTS),
            over_rounds(lambda each, more=more: (more(each, "buckets") - more(each, "many")) / (BUCKETS - 1)),
            over_rounds(lambda each, more=more: more(each, "few")),
            over_rounds(lambda each, way=way: each[way]["buckets"][1] - each[BARE]["buckets"][1]),
        )
    return table


def sharded_table(rounds: Sequence[dict[str, float]]) -> Table:
    """Tabulate what recording adds to an all-gather."""
    unrecorded = SHARDED_WAYS[0]
    table = Table("", "an all-gather", box=SIMPLE_HEAD, title="microseconds")
    for way in SHARDED_WAYS[1:]:
        added = [(measured[way] - measured[unrecorded]) / SHARDED_LAYERS for measured in rounds]
        table.add_row(way, format_interval(median_with_ci(added), 1))
    return table


def time_tight_loop(make_store: type[RecordStore], records: int = 500_000) -> float:
    """Return the nanoseconds of a clock reading and an append."""
    with tempfile.TemporaryDirectory() as folder:
        log = EventLogWriter(Path(folder) / "events.log", make_store=make_store)
        body, append, now = pack_body(Kind.GRADIENT_READY), log.append, time.monotonic_ns
        start = time.thread_time_ns()
        for _ in range(records):
            t = now()
            append(body, 7, t, t)
        taken_ns = time.thread_time_ns() - start
        log.close()
    return taken_ns / records


def time_marks(marks: int = 200_000) -> float:
    """Return the nanoseconds of CPU time of a mark and its record in C, on a stub in place of the driver.

    On an H200, recording an event through the driver takes 1.7 us more.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        stub = Stub(compile_stub(Path(folder)))
        play_torch(stub, patch)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", int)  # as there, in C: the default stream of device 0 is 0
        log = EventLogWriter(Path(folder) / "events.log", make_store=native.RecordStore)
        timer = make_timer(DEVICE, log)
        body, mark, write = pack_body(Kind.BUCKET_READY), timer.mark, timer.write
        start_ns = time.thread_time_ns()
        for _ in range(marks):
            now = mark()
            write(body, 7, now, now)
        taken_ns = time.thread_time_ns() - start_ns
        timer.close()
        log.close()
    return taken_ns / marks


def time_machine_sample(*, with_gpu: bool, samples: int = 200) -> float:
    """Return the microseconds of CPU time of a sample of this machine; a GPU's are those of Python's side of NVML."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        sampler = MachineSampler(Path(folder))
        if with_gpu:
            play_gpu(patch)
            sampler.use_device(torch.device("cuda", 0))
        sampler.run()
        start_ns = time.thread_time_ns()
        for _ in range(samples):
            sampler.run()
        taken_ns = time.thread_time_ns() - start_ns
        sampler.end()
    return taken_ns / samples / 1000


def time_user_reduction(reductions: int = 20_000) -> float:
    """Return the microseconds of CPU time that are added to a tensor which the script reduces by itself."""
    parameters = [nn.Parameter(torch.zeros(16)) for _ in range(100)]
    for parameter in parameters:
        parameter.grad = torch.ones(16)
    reduced = UserReductions()
    reader = GradientReader(reduced, parameters)
    start_ns = time.thread_time_ns()
    for _ in range(reductions // len(parameters)):
        for parameter in parameters:
            reduced.on_reduction([parameter.grad], 1, (0, 1))  # type: ignore[list-item] # each has one
        reader.take()
    return (time.thread_time_ns() - start_ns) / reductions / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of new processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="that are timed in each (%(default)s)")
    parser.add_argument("--checks", action="store_true", help="only what looks for NaN, coverage and loop facts cost")
    parser.add_argument("--way", choices=(*WAYS, *SHARDED_WAYS, *CHECKED_WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        measure_this = measure_sharded if args.way in SHARDED_WAYS else measure
        print(json.dumps(measure_this(args.way, args.steps)), flush=True)
        # A thread of gloo that asks for the GIL of an interpreter that is ending would abort the process.
        os._exit(0)
    if not native.IS_NATIVE:
        parser.error("the native code is not there: compile it with pip install -e .")
    rounds, sharded_rounds = [], []
    ways, sharded_ways = (CHECKED_WAYS, ()) if args.checks else (WAYS, SHARDED_WAYS)
    for _ in track(range(args.rounds), "measuring", console=Console(stderr=True)):
        rounds.append({way: measured_apart(way, args.steps) for way in ways})
        sharded_rounds.append({way: sharded_apart(way, args.steps) for way in sharded_ways})
    console = Console(width=TABLE_WIDTH)
    console.print(table_of(rounds, ways))
    print(f"a tensor that the script reduces: {time_user_reduction():.1f} us", flush=True)
    if args.checks:
        return
    console.print(sharded_table(sharded_rounds))
    for name, make_store in {"in C": native.RecordStore, "in Python": RecordStore}.items():
        print(f"a record in a tight loop, {name}: {time_tight_loop(make_store):.0f} ns", flush=True)
    print(f"a mark on a device and its record, in C, without its driver: {time_marks():.0f} ns", flush=True)
    for name, with_gpu in {"": False, " and a GPU, without its driver": True}.items():
        print(f"a sample of this machine{name}: {time_machine_sample(with_gpu=with_gpu):.0f} us", flush=True)


if __name__ == "__main__":
    main()
