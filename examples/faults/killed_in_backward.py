"""A rank is killed in the middle of backward.

In real life: the kernel's out-of-memory killer, a job scheduler, a machine that fails. What you see: "Connection
reset by peer" on the others, at once, without saying which rank died or what it was doing.
"""

import os
import signal

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def die(_: torch.Tensor) -> None:
    job.mark_fault()
    os.kill(os.getpid(), signal.SIGKILL)  # <- the fault


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            model.module.layers[1].weight.register_hook(die)
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
