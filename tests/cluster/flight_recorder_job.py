"""Ranks that do something wrong over gloo, and dump their Flight Recorder.

``python -m tests.cluster.flight_recorder_job hang 3 FOLDER`` made those dumps in ``tests/data/flight_recorder`` whose
names end in a number of ranks; paths in them were shortened. The others are of DDP trainings.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def healthy(rank: int) -> None:
    dist.all_reduce(torch.ones(4))


def hang(rank: int) -> None:
    """Rank 1 leaves out what the others wait in."""
    if rank != 1:
        dist.all_reduce(torch.ones(4), async_op=True)


def odd(rank: int) -> None:
    """Rank 1 calls something else."""
    if rank == 1:
        dist.broadcast(torch.ones(4), 0, async_op=True)
    else:
        dist.all_reduce(torch.ones(4), async_op=True)


def sizes(rank: int) -> None:
    """Rank 2 gives another size, which gloo's broadcast doesn't notice."""
    dist.broadcast(torch.ones(9 if rank == 2 else 8), 0, async_op=True)


def dtypes(rank: int) -> None:
    dist.broadcast(torch.ones(8, dtype=torch.float64 if rank == 2 else torch.float32), 0, async_op=True)


def subgroups(rank: int) -> None:
    """Nothing is wrong; two groups of two overlap in rank 1."""
    first = dist.new_group([0, 1])
    second = dist.new_group([1, 2], group_desc="the second pair")
    for _ in range(3):
        if rank != 2:
            dist.broadcast(torch.ones(4), 0, group=first)
        if rank != 0:
            dist.all_reduce(torch.ones(4), group=second)


def point_to_point(rank: int) -> None:
    """Nothing is wrong; gloo's recorder leaves sends and receives out, and what a monitored barrier consists of."""
    if rank == 0:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        dist.recv(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))
    dist.monitored_barrier()
    dist.barrier()


def wrapped(rank: int) -> None:
    """Nothing is wrong; the ring has lost its oldest entries (start it with TORCH_FR_BUFFER_SIZE=10)."""
    for _ in range(30):
        dist.all_reduce(torch.ones(4))


SCENARIOS = {job.__name__: job for job in (healthy, hang, odd, sizes, dtypes, subgroups, point_to_point, wrapped)}


def run(rank: int, world_size: int, scenario: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    SCENARIOS[scenario](rank)
    time.sleep(0.5)  # gloo says a moment later than Python hears it that a collective is over
    (folder / f"trace_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    (folder / f"trace_{rank}.json").write_bytes(torch._C._distributed_c10d._dump_fr_trace_json())
    (folder / f"dumped_{rank}_").touch()
    while len(list(folder.glob("dumped_*_"))) < world_size:  # who leaves first makes the others fail
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(run, (int(sys.argv[2]), sys.argv[1], Path(sys.argv[3])), nprocs=int(sys.argv[2]))
