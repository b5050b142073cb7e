"""One rank of a recorded training that keeps the links between its hosts busy.

RANK=0 WORLD_SIZE=4 python -m tests.cluster.training_over_links FOLDER STEPS RENDEZVOUS
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel

LAYERS = 4
WIDTH = 512  # a gradient of 1 MB a layer


def train(folder: str, steps: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2, trace=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    assert model.recorder is not None
    model._session.close()


if __name__ == "__main__":
    folder, steps, rendezvous = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    train(folder, int(steps))
    dist.barrier()
    dist.destroy_process_group()
