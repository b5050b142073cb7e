"""One rank of a training with our DDP, recorded if the environment says so; benchmarks/bucket_sweep.py starts it.

RANK=0 WORLD_SIZE=2 python -m benchmarks.recorded_training RENDEZVOUS MODEL STEPS
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from benchmarks.models import training_step
from benchmarks.swept_training import MODELS
from instrumented_ddp import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    rendezvous, model, steps = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    workload = MODELS[model]()
    step = training_step(workload, DistributedDataParallel(workload.module))
    for _ in range(int(steps)):
        step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
