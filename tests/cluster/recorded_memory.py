"""One process trains, recorded, and says how much more memory it uses after more steps; test_memory.py starts it."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.native import IS_NATIVE

WARM_UP_STEPS = 2_000
"""At first what is allocated grows by some bytes a step; after thirty thousand steps it no longer does."""
STEPS = 1_000


class Mallinfo2(ctypes.Structure):
    """What glibc says of its heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """What has been allocated and not freed: with PYTHONMALLOC=malloc, by Python, C and C++ alike.

    The least of several readings: other threads need some memory for a moment.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    found = []
    for _ in range(10):
        info = libc.mallinfo2()
        found.append(info.uordblks + info.hblkhd)
        time.sleep(0.02)
    return min(found)


def main() -> None:
    wrapper, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    if wrapper == "stock":
        attach(f"{folder}/traces")
        model: nn.Module = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.002)
    else:
        model = DistributedDataParallel(layers, bucket_cap_mb=0.002, trace=f"{folder}/traces")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(4, 16)

    def train(steps: int) -> int:
        for _ in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bytes_in_use()

    before = train(WARM_UP_STEPS)
    more = [train(STEPS) - before for _ in range(4)]
    print(json.dumps({"is_native": IS_NATIVE, "bytes_more": more}), flush=True)
    dist.destroy_process_group()
    # A thread of gloo that asks for the GIL of an interpreter that is ending would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
