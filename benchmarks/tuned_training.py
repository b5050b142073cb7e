"""One rank of a training with torch's DDP that knows nothing of us; benchmarks/tune.py has it tuned.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m benchmarks.tuned_training MODEL STEPS
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import training_step
from benchmarks.swept_training import MODELS


def main() -> None:
    torch.set_num_threads(1)
    model, steps = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload = MODELS[model]()
    step = training_step(workload, DistributedDataParallel(workload.module))
    for _ in range(int(steps)):
        step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
