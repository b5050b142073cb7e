"""Ranks broadcast from different roots.

In real life: ``src`` is a rank within a group on one path through the code, and a rank of the job on another. What you
see: ranks wait until the timeout, each in a broadcast that looks right.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        threshold = torch.full((4,), float(rank))
        root = 0
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            root = 1
            job.mark_fault()
        dist.broadcast(threshold, src=root)  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
