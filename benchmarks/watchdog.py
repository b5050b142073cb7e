"""What the watchdog costs a training step: the same recorded training with it and without, in pairs.

    python -m benchmarks.watchdog
    python -m benchmarks.watchdog --models mlp-400 --pairs 8 --starts 1      # a short look

Both sides of a pair are the same model with the same recorder and the same watchdog, which sleeps through the blocks
of one of them. ``benchmarks.pairing`` says how pairs are measured. A watchdog wakes every 0.7 s or so, and what that
costs is lost in the noise of any machine; in the other blocks it therefore wakes many times as often, and the excess is
divided by how many. Beside it, the CPU time of its threads at the usual rate, read from their own clocks.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console

from benchmarks.models import KNOWN_MODELS, SMALL_MODELS, TINY_MODELS, training_step
from benchmarks.pairing import BlockTimes, Side, block_of, measure_pairs, ratio_of
from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.recording.background import BackgroundScheduler
from instrumented_ddp.session import get_current_session
from instrumented_ddp.watchdog.watchdog import Watchdog
from tests.cluster.processes import METHOD

WORLD_SIZE: Final = 2
MODELS: Final = TINY_MODELS | SMALL_MODELS | KNOWN_MODELS


class PacedWatchdog(Watchdog):
    """One that can be told how often to look."""

    times_as_often = 1.0
    """As usual; 0 for never."""

    def _look(self) -> None:
        if self.times_as_often:
            super()._look()

    def _interval_s(self, age_s: float) -> float:
        return super()._interval_s(age_s) / (self.times_as_often or 1.0)

    @contextmanager
    def looks(self, times_as_often: float) -> Iterator[None]:
        """Have the watchdog look so often in what is measured inside."""
        self.times_as_often = times_as_often
        self._scheduler.wake(self)
        yield


def cpu_s_of_watchdog(scheduler: BackgroundScheduler) -> float:
    """Return the CPU seconds of the watchdog's thread until now; it has no other job there."""
    thread = scheduler._thread
    assert thread is not None
    assert thread.ident
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@dataclass(frozen=True)
class Found:
    """Of one start of the processes."""

    times: BlockTimes
    cpu_share: float
    """CPU time of the watchdog's threads on rank 0 while it is awake, over wall time."""


def run_rank(
    rank: int,
    model: str,
    pairs: int,
    block_s: float,
    warm_up_s: float,
    times: float,
    start: int,
    folder: str,
    found: SimpleQueue[Found | None],
) -> None:
    """Run one rank of one start of the processes."""
    torch.set_num_threads(1)
    torch.manual_seed(start)
    # A store over TCP, as with torchrun: asking it is what a watchdog spends most of its time with.
    address = Path(folder, "address").read_text()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD_SIZE)
    workload = MODELS[model]()
    recorded = DistributedDataParallel(workload.module, trace=f"{folder}/trace", on_incident="off")
    step = training_step(workload, recorded)
    session = get_current_session()
    assert session is not None, "nothing is recorded"
    scheduler = BackgroundScheduler(rank)
    watchdog = PacedWatchdog(
        session.collectives,
        session.models,
        session.replicas,
        session.caught,
        scheduler,
        abort_after_s=None,
        on_fault=lambda: None,
        before_exit=lambda: None,
    )
    warm_up = block_of(step, at_least_s=warm_up_s)
    for _ in range(warm_up.steps):
        step()
    started_s, cpu_s = time.monotonic(), cpu_s_of_watchdog(scheduler)
    for _ in range(warm_up.steps):
        step()
    cpu_share = (cpu_s_of_watchdog(scheduler) - cpu_s) / (time.monotonic() - started_s)
    block = block_of(step, at_least_s=block_s)
    on_pair: Callable[[], object] = (lambda: found.put(None)) if rank == 0 else (lambda: None)
    sides = Side(step, around=partial(watchdog.looks, times)), Side(step, around=partial(watchdog.looks, 0.0))
    block_times = measure_pairs({"watchdog": sides}, block, most_pairs=pairs, seed=start, on_pair=on_pair)
    if rank == 0:
        found.put(Found(block_times["watchdog"], cpu_share))
    scheduler.close(1.0)
    watchdog.close()
    session.close()
    dist.destroy_process_group()


def measure(model: str, pairs: int, block_s: float, warm_up_s: float, times: float, start: int) -> Found:
    """Start the ranks, wait for what they find."""
    queue: SimpleQueue[Found | None] = torch.multiprocessing.get_context(METHOD).SimpleQueue()
    found: Found | None = None
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            Path(folder, "address").write_text(f"tcp://127.0.0.1:{free.getsockname()[1]}")
        arguments = model, pairs, block_s, warm_up_s, times, start, folder, queue
        ranks = torch.multiprocessing.start_processes(run_rank, arguments, WORLD_SIZE, join=False, start_method=METHOD)
        has_ended = False
        while not has_ended:
            has_ended = ranks.join(timeout=0.2)
            while not queue.empty():
                found = queue.get() or found
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    assert found is not None
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watchdog",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(SMALL_MODELS), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--pairs", type=int, default=20, help="of each start (default: 20)")
    parser.add_argument("--starts", type=int, default=3, help="how often processes are started anew (default: 3)")
    parser.add_argument("--times", type=float, default=16, help="as often as usual that it wakes (default: 16)")
    parser.add_argument("--block-s", type=float, default=1.0, help="least time of a block of steps (default: 1)")
    parser.add_argument(
        "--warm-up-s",
        type=float,
        default=8.0,
        help="before; it wakes more often in its first five seconds (default: 8)",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    console = Console(highlight=False, soft_wrap=True)
    load = " ".join(f"{average:.2f}" for average in os.getloadavg())
    console.print(
        f"{shlex.join(['python', '-m', 'benchmarks.watchdog', *sys.argv[1:]])}\n"
        f"{os.cpu_count()} CPU cores, load average {load} at the start, {WORLD_SIZE} ranks over gloo, "
        f"torch {torch.__version__}",
        markup=False,
    )
    ratios = []
    for model in args.models:
        how = args.pairs, args.block_s, args.warm_up_s, args.times
        starts = [measure(model, *how, number) for number in range(args.starts)]
        wall = ratio_of([found.times.wall_ns for found in starts])
        cpu = ratio_of([found.times.cpu_ns for found in starts])
        share = np.median([found.cpu_share for found in starts])
        usual = [1 + (ratio - 1) / args.times for ratio in (wall.median, wall.low, wall.high)]
        ratios.append(usual[0])
        console.print(
            f"{model:12} waking {args.times:g} times as often: wall {wall}   CPU {cpu}\n"
            f"{'':12} as usual: wall {usual[0]:.4f} [{usual[1]:.4f}, {usual[2]:.4f}]   {share:.2%} of a core",
            markup=False,
        )
    console.print(f"Step time with a watchdog / without, median over the models: {np.median(ratios):.4f}")


if __name__ == "__main__":
    main()
