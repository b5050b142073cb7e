"""Ranks reduce tensors of the same size but different types.

In real life: a float64 from NumPy or a Python float on one path through the code. What you see: gloo
aborts the process: SIGABRT, no Python exception, no traceback.
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
        metrics = torch.zeros(100)
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            metrics = metrics.double()
            job.mark_fault()
        dist.all_reduce(metrics)  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
