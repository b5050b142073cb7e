"""What the watchdog costs a training step: the same recorded training with it and without, in pairs.

    python -m benchmarks.watchdog
    python -m benchmarks.watchdog --models mlp-400 --pairs 8 --starts 1      # a short look

Both sides of a pair are the same model with the same recorder; around the blocks of one of them a watchdog runs, as
it does in every recording. ``benchmarks.pairing`` says how pairs are measured. A block is long, because a watchdog
wakes about twice a second: a ratio of short blocks would be that of steps in which it sleeps.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console

from benchmarks.models import KNOWN_MODELS, SMALL_MODELS
from benchmarks.pairing import BlockTimes, Side, block_of, measure_pairs, ratio_of
from benchmarks.step_time import WARM_UP_STEPS, WORLD_SIZE, make_step
from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.collectives import Collectives, collectives_of_this_process
from instrumented_ddp.watchdog import Watchdog

MODELS: Final = SMALL_MODELS | KNOWN_MODELS


@contextmanager
def watched(collectives: Collectives) -> Iterator[None]:
    """A watchdog watches, from its beginning, when it wakes more often than later."""
    watchdog = Watchdog(collectives)
    try:
        yield
    finally:
        watchdog.close()


def run_rank(
    rank: int, model: str, pairs: int, block_s: float, start: int, address: str, found: SimpleQueue[BlockTimes | None]
) -> None:
    """One rank of one start of the processes."""
    torch.set_num_threads(1)
    torch.manual_seed(start)
    # A store over TCP, as with torchrun: asking it is what a watchdog spends most of its time with.
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        step = make_step(MODELS[model](), partial(DistributedDataParallel, trace=f"{folder}/{rank}", on_incident="off"))
        collectives = collectives_of_this_process()
        assert collectives is not None, "nothing is recorded"
        for _ in range(WARM_UP_STEPS):
            step()
        sides = Side(step, around=partial(watched, collectives)), Side(step)
        block = block_of(step, at_least_s=block_s)
        on_pair: Callable[[], object] = (lambda: found.put(None)) if rank == 0 else (lambda: None)
        times = measure_pairs({"watched": sides}, block, most_pairs=pairs, seed=start, on_pair=on_pair)
        if rank == 0:
            found.put(times["watched"])
        collectives.close()
    dist.destroy_process_group()


def measure(model: str, pairs: int, block_s: float, start: int) -> BlockTimes:
    """Start the ranks, wait for what they find."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    found: SimpleQueue[BlockTimes | None] = torch.multiprocessing.get_context("spawn").SimpleQueue()
    arguments = model, pairs, block_s, start, address, found
    ranks = torch.multiprocessing.spawn(run_rank, arguments, nprocs=WORLD_SIZE, join=False)
    times: BlockTimes | None = None
    has_ended = False
    while not has_ended:
        has_ended = ranks.join(timeout=0.2)
        while not found.empty():
            times = found.get() or times
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    assert times is not None
    return times


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
    parser.add_argument("--block-s", type=float, default=2.0, help="least time of a block of steps (default: 2)")
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
        starts = [measure(model, args.pairs, args.block_s, number) for number in range(args.starts)]
        wall, cpu = ratio_of([times.wall_ns for times in starts]), ratio_of([times.cpu_ns for times in starts])
        ratios.append(wall.median)
        console.print(f"{model:12} with a watchdog / without: wall {wall}   CPU {cpu}", markup=False)
    console.print(f"Median over the models: {np.median(ratios):.4f}")


if __name__ == "__main__":
    main()
