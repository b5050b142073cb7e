"""Rank 0 saves a checkpoint, which takes as long as twenty steps.

Nothing is wrong: the others wait for it.
"""

import math
import tempfile
import time

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step_s = math.inf
    for step, (inputs, labels) in enumerate(job.batches()):
        began_s = time.monotonic()
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        step_s = min(step_s, time.monotonic() - began_s)
        if rank == 0 and step == job.FAULT_STEP:
            with tempfile.TemporaryFile() as checkpoint:
                torch.save(model.module.state_dict(), checkpoint)
                time.sleep(20 * step_s)  # a slow file system


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
