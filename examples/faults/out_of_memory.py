"""One rank runs out of memory and gets an exception.

In real life: one sample that is much longer than all others. What you see: an allocation fails on rank 1, and the
others fail with "Connection closed by peer" when it has exited.
"""

import resource

import job
import torch
import torch.distributed as dist
from torch.nn import functional

LIMIT_BYTES = 8 * 1024**3


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == job.FAULTY_RANK:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            inputs = inputs.repeat(1_000_000, 1)  # <- the fault
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
