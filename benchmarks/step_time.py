"""What recording costs a training step in CPU time: with stock's DDP and ours, recorded in C and in Python.

    python -m benchmarks.step_time [--models transformer convnet] [--rounds 9] [--threads]

Two ranks train over gloo on this machine, one compute thread each, and each with all its threads on a core of its own:
forward, backward, optimizer, ``zero_grad``. Every run starts new processes. In each round all ways take turns, so that
all of them see the machine as it is then, and another one begins. Recorded is what ``overlapscope record`` has
recorded, with the native code or, where it says so, with its twins in Python (OVERLAPSCOPE_NATIVE=0).

CPU time is that of a rank's process with all its threads, the mean over steps and ranks. Of stock's DDP, not recorded,
the first table has the median over rounds in milliseconds, of the others the median over rounds of the ratio to it in
the same round, with its 90 % interval from five rounds on. The second table has what recording adds in microseconds a
step, and how much of it threads take that are not there otherwise; with --threads a third one says what each thread of
rank 0 takes. Wall time is left out: it means little where ranks share cores with anything else, of which the last line
says how much there was.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.medians import format_interval, median_with_ci
from benchmarks.models import KNOWN_MODELS, SMALL_MODELS
from benchmarks.timed_training import MODELS, Timed
from instrumented_ddp.native import IS_NATIVE, NATIVE_VARIABLE
from overlapscope.cli.child_process import environment_without_recording, recording_environment
from overlapscope.interval import Interval
from overlapscope.trace.environment import DETAILS, Detail, add_startup_hook
from overlapscope.trace.event_log import read_latest_step
from overlapscope.trace.schema import EVENTS_FILE, rank_folder
from tests.cluster.processes import METHOD, Program, run_together

WORLD_SIZE: Final = 2
TIME_LIMIT_S: Final = 1800
TABLE_WIDTH: Final = 150


@dataclass(frozen=True)
class Way:
    """Of doing the same training."""

    wrapper: str
    is_recorded: bool = False
    is_native: bool = True

    def __str__(self) -> str:
        recorded = ", recorded" if self.is_recorded else ""
        return f"{self.wrapper}{recorded}{'' if self.is_native else ' in Python'}"


STOCK: Final = Way("stock")
OURS: Final = Way("ours")
RECORDED: Final = tuple(Way(wrapper, True, is_native) for wrapper in ("stock", "ours") for is_native in (True, False))
WAYS: Final = (STOCK, *RECORDED[:2], OURS, *RECORDED[2:])

Run = list[Timed]
"""By rank."""


def run(model: str, way: Way, steps: int, detail: Detail) -> Run:
    """Train once, in new processes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        traces = folder / "traces"
        environment = (
            add_startup_hook(recording_environment(traces, detail))
            if way.is_recorded
            else environment_without_recording()
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", NATIVE_VARIABLE: str(int(way.is_native))}
        # A store over TCP, as with torchrun: watchdogs ask it.
        environment |= {"WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = ["-m", "benchmarks.timed_training", temporary, way.wrapper, model, str(steps)]
        cores = sorted(os.sched_getaffinity(0))
        programs = [
            Program([*arguments, str(cores[rank % len(cores)])], environment | {"RANK": str(rank)})
            for rank in range(WORLD_SIZE)
        ]
        try:
            run_together(programs, TIME_LIMIT_S)
        except (RuntimeError, TimeoutError) as error:
            error.add_note(f"in a run of {model} with {way}")
            raise
        is_recorded = (read_latest_step(rank_folder(traces, 0) / EVENTS_FILE) or 0) >= steps
        assert is_recorded == way.is_recorded, f"{way}: recorded is {is_recorded}"
        ranks = [Timed.read(folder / f"{rank}.json") for rank in range(WORLD_SIZE)]
        # Who is forked from a warm server has its native code.
        assert METHOD == "forkserver" or all(timed.is_native == way.is_native for timed in ranks), way
        return ranks


def cpu_ns(run: Run) -> float:
    """Return the CPU time of a rank's step."""
    return statistics.mean(timed.cpu_ns for timed in run)


@dataclass(frozen=True)
class Measured:
    """One model."""

    model: str
    rounds: list[dict[Way, Run]]

    def stock_ms(self) -> float:
        """Return the CPU time of a step with stock's DDP, not recorded."""
        return statistics.median(cpu_ns(runs[STOCK]) for runs in self.rounds) / 1e6

    def ratio(self, way: Way) -> Interval:
        """Return the CPU time of a step, to that of stock's DDP, not recorded."""
        return median_with_ci([cpu_ns(runs[way]) / cpu_ns(runs[STOCK]) for runs in self.rounds])

    def added_us(self, way: Way) -> Interval:
        """Return the CPU time of a step, minus that of the same DDP, not recorded."""
        before = Way(way.wrapper)
        return median_with_ci([(cpu_ns(runs[way]) - cpu_ns(runs[before])) / 1e3 for runs in self.rounds])

    def helpers_us(self, way: Way) -> Interval:
        """Return the CPU time a step of the threads that only a recording has."""
        return median_with_ci([_helpers_ns(runs[way], runs[Way(way.wrapper)]) / 1e3 for runs in self.rounds])

    def helpers(self, way: Way) -> int:
        """Return how many threads rank 0 has more than with the same DDP, not recorded."""
        runs = self.rounds[-1]
        return runs[way][0].thread_count - runs[Way(way.wrapper)][0].thread_count

    def thread_us(self, way: Way) -> dict[str, float]:
        """Return the CPU time a step of each thread of rank 0, by name."""
        runs = [runs[way][0].thread_ns for runs in self.rounds]
        return {name: statistics.median(run.get(name, 0.0) for run in runs) / 1e3 for name in runs[0]}


def _helpers_ns(recorded: Run, before: Run) -> float:
    known = before[0].thread_ns.keys()
    return statistics.mean(sum(ns for name, ns in rank.thread_ns.items() if name not in known) for rank in recorded)


def ratio_table(models: Sequence[Measured]) -> Table:
    """Tabulate a row a model, and the median and maximum of all."""
    table = Table("model", "stock\nCPU ms", box=SIMPLE_HEAD)
    for way in WAYS[1:]:
        table.add_column(f"{way}\nratio (90 %)", justify="right")
    for measured in models:
        ratios = (format_interval(measured.ratio(way), 3) for way in WAYS[1:])
        table.add_row(measured.model, f"{measured.stock_ms():.1f}", *ratios)
    for name, of_all in (("median", statistics.median), ("largest", max)):
        of_models = (of_all(measured.ratio(way).value for measured in models) for way in WAYS[1:])
        table.add_row(name, "", *(f"{ratio:.3f}" for ratio in of_models))
    return table


def added_table(models: Sequence[Measured]) -> Table:
    """Tabulate a row a model and way to record it."""
    table = Table("model", "microseconds a step", box=SIMPLE_HEAD)
    for column in ("added", "of these, added threads", "threads"):
        table.add_column(column, justify="right")
    for measured in models:
        for way in RECORDED:
            added, helpers = (format_interval(us, 0) for us in (measured.added_us(way), measured.helpers_us(way)))
            is_last = way == RECORDED[-1]
            table.add_row(measured.model, str(way), added, helpers, f"{measured.helpers(way):+}", end_section=is_last)
    return table


def thread_table(models: Sequence[Measured]) -> Table:
    """Tabulate a row a thread of any model; what is not recorded beside what is."""
    table = Table("model", "CPU time of rank 0, µs a step", box=SIMPLE_HEAD)
    for way in WAYS:
        table.add_column(str(way), justify="right")
    for measured in models:
        by_way = [measured.thread_us(way) for way in WAYS]
        for name in dict.fromkeys(name for thread_us in reversed(by_way) for name in thread_us):
            cells = (f"{thread_us[name]:.0f}" if name in thread_us else "-" for thread_us in by_way)
            table.add_row(measured.model, name, *cells)
        table.add_section()
    return table


def cpu_seconds_of_others() -> float:
    """Return what all processes of this machine have used, without this one and its children that have ended."""
    machine = psutil.cpu_times()
    return float(sum(machine) - machine.idle - machine.iowait - sum(os.times()[:4]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = [*SMALL_MODELS, *KNOWN_MODELS]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=usual, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7, help="runs of each way (default: 7)")
    parser.add_argument("--steps", type=int, default=100, help="of each run that count (default: 100)")
    parser.add_argument("--detail", choices=DETAILS, default=DETAILS[0], help="what is recorded (default: buckets)")
    parser.add_argument("--threads", action="store_true", help="also say what each thread takes")
    args = parser.parse_args()
    if not IS_NATIVE:
        parser.error("the native code is not there: compile it with pip install -e .")
    missing = [model for model in args.models if model in KNOWN_MODELS]
    if missing and importlib.util.find_spec("transformers") is None:
        parser.error(f"{' and '.join(missing)} need the transformers package: pip install -e '.[test]'")
    return args


def main() -> None:
    args = parse_arguments()
    load = " ".join(f"{average:.2f}" for average in os.getloadavg())
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(shlex.join(["python", "-m", "benchmarks.step_time", *sys.argv[1:]]), markup=False)
    console.print(
        f"{os.cpu_count()} CPU cores, load average {load} at the start, {WORLD_SIZE} ranks over gloo, "
        f"torch {torch.__version__}"
    )
    begun, others_before_s = time.monotonic(), cpu_seconds_of_others()
    models = []
    for model in args.models:
        rounds = []
        for number in track(range(args.rounds), model, console=Console(stderr=True), transient=True):
            first = number % len(WAYS)
            rounds.append({way: run(model, way, args.steps, args.detail) for way in WAYS[first:] + WAYS[:first]})
        models.append(Measured(model, rounds))
    console.print(ratio_table(models))
    console.print(added_table(models))
    if args.threads:
        console.print(thread_table(models))
    cores_of_others = (cpu_seconds_of_others() - others_before_s) / (time.monotonic() - begun)
    console.print(f"Other processes used {cores_of_others:.2f} of {os.cpu_count()} cores meanwhile.")


if __name__ == "__main__":
    main()
