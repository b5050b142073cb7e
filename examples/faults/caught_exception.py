"""One rank catches its exception, says so, and exits.

In real life: a ``try`` around ``main`` that logs the error and calls ``sys.exit(1)``. What you see: the others fail
with "Connection closed by peer"; what rank 1 had to say is in its own log, if anywhere.
"""

import sys

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            raise ValueError("a label is out of range")
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"training failed: {error}")
        sys.exit(1)  # <- the fault
    dist.destroy_process_group()
