"""Are ranks with shifted and drifting clocks brought onto one clock, to within the error that is stated?

    OMP_NUM_THREADS=1 python benchmarks/clock_recovery.py [--runs 100] [--seconds 2]

Trains on two ranks over gloo, again and again, each time with a recording of its own. In rank 1 the clock is played:
``time.monotonic_ns`` is shifted by up to 5 s and drifts by up to 100 ppm, drawn anew for each run, and its boot
identity is another, so that it takes itself for another host. All else is real: the training that goes on meanwhile,
the sockets, the threads, the reader. Since the true clock is known, so is the error of every time in the recording.

Prints in how many runs all starts of steps were within the stated error, the worst and the median error, the error
that is stated, and the same for one sample of the wall clock, taken when the recording began. (The wall clocks agree
here, which those of two hosts don't: what is left is the drift.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.trace.event_log import read_log
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import EVENTS_FILE, RANK_FILE, Kind, rank_folder
from tests.cluster.processes import METHOD
from tests.cluster.training_on_played_clock import PlayedClock, forget_what_is_ours, real_times, train

MOST_SHIFT_NS = 5_000_000_000
MOST_DRIFT = 100e-6


def run_rank(rank: int, folder: Path, runs: int, seconds: float) -> None:
    clock = PlayedClock(time.monotonic_ns)
    if rank == 1:
        time.monotonic_ns = clock.now_ns
        forget_what_is_ours()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from overlapscope.trace import clocks

    if rank == 1:
        clocks.get_boot_id = lambda: "another host"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    chance = random.Random(1)
    for run in range(runs):
        shift_ns, drift = chance.randint(-MOST_SHIFT_NS, MOST_SHIFT_NS), chance.uniform(-MOST_DRIFT, MOST_DRIFT)
        if rank == 1:
            clock.turn(shift_ns, drift)
        train(folder / f"run_{run}", seconds)
        if rank == 1:
            clock.save(folder / f"run_{run}" / "truth.json")
    dist.destroy_process_group()


def errors_of(recording: Path) -> tuple[float, float, float, float]:
    """Return the worst and the median error of a run in microseconds, what is stated, and the wall clock's worst."""
    trace = read_trace(recording)
    if trace.aligned_ranks != (0, 1):
        raise SystemExit(f"{recording}: not aligned: {trace.problems}")
    _, records, _ = read_log(rank_folder(recording, 1) / EVENTS_FILE)
    shown_ns = records["start_ns"][records["kind"] == Kind.STEP]
    true_ns = real_times(recording / "truth.json", shown_ns)
    error_us = np.abs(trace.steps.loc[trace.steps["rank"] == 1, "start_ns"].to_numpy() - true_ns) / 1e3
    unix_less_own_ns = [
        sample["unix_ns"] - sample["monotonic_ns"]
        for rank in range(2)
        for sample in json.loads((rank_folder(recording, rank) / RANK_FILE).read_text())["clock_samples"]
    ]
    naive_us = np.abs(shown_ns + unix_less_own_ns[1] - unix_less_own_ns[0] - true_ns) / 1e3
    return error_us.max(), float(np.median(error_us)), trace.clock_error_ns / 1e3, naive_us.max()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_rank, (Path(folder), args.runs, args.seconds), nprocs=2, start_method=METHOD
        )
        worst, median, stated, naive = np.array([errors_of(Path(folder) / f"run_{run}") for run in range(args.runs)]).T
    print(f"within the stated error: {(worst <= stated).sum()} of {args.runs} runs")
    print(f"error:        median {np.median(median):8.1f} µs   worst {worst.max():8.1f} µs")
    print(f"stated error: median {np.median(stated):8.1f} µs   worst {stated.max():8.1f} µs")
    print(f"wall clock:   worst of a run, median {np.median(naive):8.1f} µs   worst {naive.max():8.1f} µs")


if __name__ == "__main__":
    main()
