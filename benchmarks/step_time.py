"""What recording costs a training that used stock DDP before: ratios of step times.

    python -m benchmarks.step_time [--models resnet-50 bert-base] [--detail parameters]

Two ranks train over gloo on this machine, one thread each: forward, backward, optimizer, ``zero_grad``. Every model is
trained without and with ``gradient_as_bucket_view``, and in the same processes by these DDP instances:

recorded        instrumented_ddp's DistributedDataParallel, which records into a folder on disk
nothing         a second instance of torch's: what this method reads where there is nothing to be read
torch.profiler  torch's, with ``torch.profiler.profile(activities=[CPU])`` running. Starting it, and making events of
                what it has seen, is not counted

each compared with one and the same instance of torch's. The instances see the same batch and share the memory of one
set of weights, so they differ in nothing but their buckets. Blocks of steps are measured in pairs (benchmarks/
pairing.py says how, and which time is taken), after warm-up steps in which buckets are rebuilt. A line is the median
over pairs of the ratio of the blocks' times, with a 95 % bootstrap interval; processes are started several times,
because a ratio also depends on where memory happens to lie. A recorder's hooks around optimizers are global: they
cost the stock instances about a microsecond per step as well.

With its defaults this takes about 20 minutes. Wall times mean little while other processes use the cores: how much
they did is printed last.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Final

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

import instrumented_ddp
from benchmarks.models import KNOWN_MODELS, SMALL_MODELS, Workload, share_weights
from benchmarks.pairing import BlockTimes, Comparison, Estimate, Side, block_of, measure_pairs, ratio_of
from overlapscope.trace.environment import DETAIL_VARIABLE, DETAILS
from overlapscope.trace.reader import read_trace

MODELS: Final = SMALL_MODELS | KNOWN_MODELS
WORLD_SIZE: Final = 2
WARM_UP_STEPS: Final = 4
"""Of each instance. Stock DDP rebuilds its buckets in the second step."""
BLOCK_S: Final = 0.05
TABLE_WIDTH: Final = 120
RECORDED, NOTHING, PROFILER = "recorded", "nothing", "torch.profiler"


@dataclass(frozen=True)
class Case:
    """One training whose step time is measured."""

    model: str
    gradient_as_bucket_view: bool

    def __str__(self) -> str:
        return f"{self.model}, {'bucket views' if self.gradient_as_bucket_view else 'copies'}"


@dataclass(frozen=True)
class Effort:
    """What is compared with stock DDP beside the recorded instance, and how often."""

    control: bool
    profiler: bool
    most_pairs: int
    most_seconds: float


@dataclass(frozen=True)
class Measured:
    """What one start of the processes has found."""

    steps_per_block: int
    times: dict[str, BlockTimes]


@dataclass(frozen=True)
class Line:
    """One comparison of one case, over all starts."""

    case: Case
    comparison: str
    step_ms: float
    """Of stock DDP."""
    pairs: int
    wall: Estimate
    cpu: Estimate


def make_step(workload: Workload, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """A training step of a new DDP instance."""
    model = wrap(share_weights(workload.module))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        workload.loss_of(model(**workload.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_case(case: Case, effort: Effort, start: int, folder: str, on_pair: Callable[[], object]) -> Measured:
    """Compare the instances with each other. All ranks call this together."""
    torch.manual_seed(start)
    workload = MODELS[case.model]()
    stock = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=case.gradient_as_bucket_view)
    recorded = partial(
        instrumented_ddp.DistributedDataParallel,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        trace=f"{folder}/traces",
    )
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {"stock": stock, RECORDED: recorded}
    if effort.control:
        wrappers[NOTHING] = stock
    # Who is made first gets other memory than who is made last.
    names = [list(wrappers)[number] for number in torch.randperm(len(wrappers))]
    steps = {name: make_step(workload, wrappers[name]) for name in names}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()

    baseline = Side(steps["stock"])
    comparisons: dict[str, Comparison] = {name: (Side(steps[name]), baseline) for name in wrappers if name != "stock"}
    if effort.profiler:
        profiled = Side(steps["stock"], around=partial(profile, activities=[ProfilerActivity.CPU]))
        with profiled.around():  # the first time takes longer
            profiled.step()
        comparisons[PROFILER] = profiled, baseline
    block = block_of(steps["stock"], BLOCK_S)
    # The collector goes on as in any training, but need not look through all that has been imported.
    gc.collect()
    gc.freeze()
    times = measure_pairs(
        comparisons,
        block,
        most_pairs=effort.most_pairs,
        most_seconds=effort.most_seconds,
        seed=start,
        on_pair=on_pair,
    )
    return Measured(block.steps, times)


def run_rank(
    rank: int, case: Case, effort: Effort, start: int, folder: str, reports: SimpleQueue[Measured | None]
) -> None:
    """A rank's process: rank 0 reports None for every pair that is done, and at last what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    measured = measure_case(case, effort, start, folder, partial(reports.put, None) if rank == 0 else lambda: None)
    if rank == 0:
        reports.put(measured)
    dist.destroy_process_group()


def measure_in_new_processes(case: Case, effort: Effort, start: int, on_pair: Callable[[], object]) -> Measured:
    """Start the ranks, wait for what they find."""
    reports: SimpleQueue[Measured | None] = torch.multiprocessing.get_context("spawn").SimpleQueue()
    measured: Measured | None = None
    with tempfile.TemporaryDirectory() as folder:
        arguments = case, effort, start, folder, reports
        ranks = torch.multiprocessing.spawn(run_rank, arguments, nprocs=WORLD_SIZE, join=False)
        has_ended = False
        while not has_ended:
            has_ended = ranks.join(timeout=0.2)
            while not reports.empty():
                report = reports.get()
                if report is None:
                    on_pair()
                else:
                    measured = report
        assert len(read_trace(f"{folder}/traces").steps), "nothing was recorded"
    assert measured is not None
    return measured


def lines_of(case: Case, starts: list[Measured]) -> Iterable[Line]:
    """The comparisons of one case."""
    for name in starts[0].times:
        wall_ns = [measured.times[name].wall_ns for measured in starts]
        cpu_ns = [measured.times[name].cpu_ns for measured in starts]
        step_ns = np.concatenate(
            [times[:, 1] / measured.steps_per_block for times, measured in zip(wall_ns, starts, strict=True)]
        )
        yield Line(
            case=case,
            comparison=name,
            step_ms=float(np.median(step_ns)) / 1e6,
            pairs=len(step_ns),
            wall=ratio_of(wall_ns),
            cpu=ratio_of(cpu_ns),
        )


def table_of(lines: Iterable[Line]) -> Table:
    """A row a line, the step time of a case once."""
    table = Table("model", "gradients", box=SIMPLE_HEAD)
    for heading in ("stock, ms", "pairs"):
        table.add_column(heading, justify="right")
    for heading in ("compared with stock", "wall time", "CPU time"):
        table.add_column(heading)
    for column in table.columns:
        column.no_wrap = True
    before = None
    for line in lines:
        gradients = "bucket views" if line.case.gradient_as_bucket_view else "copies"
        first = (line.case.model, gradients, f"{line.step_ms:.1f}", str(line.pairs))
        table.add_row(*(("",) * 4 if line.case == before else first), line.comparison, str(line.wall), str(line.cpu))
        before = line.case
    return table


def medians_over_cases(lines: list[Line]) -> Iterable[str]:
    """A sentence a comparison: median and range over all models, both ways."""
    for name in dict.fromkeys(line.comparison for line in lines):
        described = []
        for clock in ("wall", "cpu"):
            ratios = [getattr(line, clock).median for line in lines if line.comparison == name]
            described.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        yield f"{name:15} wall {described[0]}   CPU {described[1]}"


def describe_machine(detail: str) -> str:
    """What one needs to know to quote the figures."""
    command = shlex.join(["python", "-m", "benchmarks.step_time", *sys.argv[1:]])
    load = " ".join(f"{average:.2f}" for average in os.getloadavg())
    return (
        f"{command}\n{os.cpu_count()} CPU cores, load average {load} at the start, {WORLD_SIZE} ranks over gloo, "
        f"detail {detail}, torch {torch.__version__}"
    )


def cpu_seconds_of_others() -> float:
    """What all processes of this machine have used, without this one and its children that have ended."""
    machine = psutil.cpu_times()
    return sum(machine) - machine.idle - machine.iowait - sum(os.times()[:4])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--pairs", type=int, default=60, help="most pairs per line of the table (default: 60)")
    parser.add_argument(
        "--seconds-per-model",
        type=float,
        default=240,
        help="of measuring, both settings of gradient_as_bucket_view together; pairs end early (default: 240)",
    )
    parser.add_argument("--starts", type=int, default=3, help="how often processes are started anew (default: 3)")
    parser.add_argument("--detail", choices=DETAILS, default=DETAILS[0], help="what is recorded (default: buckets)")
    parser.add_argument("--no-control", action="store_true", help="no second stock instance: less memory, less time")
    parser.add_argument("--no-profiler", action="store_true", help="leave torch.profiler out")
    args = parser.parse_args()
    missing = [model for model in args.models if model in KNOWN_MODELS]
    if missing and importlib.util.find_spec("transformers") is None:
        parser.exit(
            1,
            f"{' and '.join(missing)} need the transformers package; it comes with: "
            "pip install -c constraints.txt -e '.[test]'\n",
        )
    return args


def main() -> None:
    args = parse_arguments()
    os.environ[DETAIL_VARIABLE] = args.detail
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "KINETO_LOG_LEVEL": "6"}
    cases = [Case(model, views) for model in args.models for views in (False, True)]
    effort = Effort(
        control=not args.no_control,
        profiler=not args.no_profiler,
        most_pairs=-(-args.pairs // args.starts),
        most_seconds=args.seconds_per_model / 2 / args.starts,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(describe_machine(args.detail), markup=False)
    begun, others_before = time.monotonic(), cpu_seconds_of_others()
    lines: list[Line] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pairs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False, soft_wrap=True)) as progress:
        for case in cases:
            task = progress.add_task(str(case), total=effort.most_pairs * args.starts)
            on_pair = partial(progress.advance, task)
            starts = [measure_in_new_processes(case, effort, number, on_pair) for number in range(args.starts)]
            progress.stop_task(task)
            for line in lines_of(case, starts):
                progress.console.print(f"{line.comparison:14} wall {line.wall}   CPU {line.cpu}   {case}", markup=False)
                lines.append(line)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table_of(lines))
    console.print("Median (smallest to largest) of these ratios")
    for sentence in medians_over_cases(lines):
        console.print(sentence, markup=False)
    cores_of_others = (cpu_seconds_of_others() - others_before) / (time.monotonic() - begun)
    console.print(f"\nOther processes used {cores_of_others:.2f} of {os.cpu_count()} cores meanwhile.")


if __name__ == "__main__":
    main()
