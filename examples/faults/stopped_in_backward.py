"""A rank is stopped (SIGSTOP) in the middle of backward, and never resumed.

In real life: Ctrl-Z in the wrong terminal, a debugger left attached, a scheduler that suspends jobs. What you
see: the others time out. The stopped rank stays there until someone notices.
"""

import os
import signal

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def stop(_: torch.Tensor) -> None:
    job.mark_fault()
    os.kill(os.getpid(), signal.SIGSTOP)  # <- the fault


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            model.module.layers[1].weight.register_hook(stop)
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
