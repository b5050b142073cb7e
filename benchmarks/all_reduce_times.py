"""One rank of a sweep of all-reduces over sizes, alone and two at a time.

    RANK=0 WORLD_SIZE=2 python -m benchmarks.all_reduce_times FOLDER

Every rank leaves FOLDER/RANK.npz: when it started each of them and when each was over, on the clock that the processes
of a machine share. ``read_samples`` makes transfer times of what all ranks have left.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

SIZES_BYTES: Final = tuple(2**power for power in range(10, 27))
"""1 KiB to 64 MiB."""
IN_FLIGHT: Final = (1, 2)
"""gloo works on two collectives of a group at a time."""


def repetitions_of(size_bytes: int) -> int:
    """How often a size is measured, after one time that does not count."""
    return 20 if size_bytes <= 1024**2 else 10 if size_bytes <= 8 * 1024**2 else 4


def time_all_reduces(size_bytes: int, in_flight: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Start some at once and wait for all of them, over and over.

    Returns:
        (repetitions, 2): start and end, ns.
    """
    tensors = [torch.ones(size_bytes // 4) for _ in range(in_flight)]
    stamps = np.empty((1 + repetitions_of(size_bytes), 2), np.int64)
    for stamp in stamps:
        stamp[0] = time.monotonic_ns()
        for work in [dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True) for tensor in tensors]:
            work.wait()
        stamp[1] = time.monotonic_ns()
    return stamps[1:]


def read_samples(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Transfer times by size and number in flight: from when the last rank has started to when the last one is done."""
    ranks = [np.load(folder / f"{rank}.npz") for rank in range(world_size)]
    samples = []
    for name in ranks[0].files:
        size_bytes, in_flight = map(int, name.split("x"))
        last = np.max([rank[name] for rank in ranks], axis=0)
        samples.append({"bytes": size_bytes, "in_flight": in_flight, "transfer_ns": (last[:, 1] - last[:, 0]).tolist()})
    return samples


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    stamps = {f"{size}x{count}": time_all_reduces(size, count) for size in SIZES_BYTES for count in IN_FLIGHT}
    np.savez(folder / f"{rank}.npz", **stamps)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
