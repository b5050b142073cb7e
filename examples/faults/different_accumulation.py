"""One rank accumulates the gradients of two batches for an update where the others accumulate four.

In real life: the number is computed from the memory of each rank's device, or follows a schedule. What you see:
nothing. Every backward is averaged, but ranks update their weights at different times, and so they average gradients
of different weights.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch, (inputs, labels) in enumerate(job.batches()):
        accumulated = 4
        if rank == job.FAULTY_RANK and batch >= job.FAULT_STEP:
            accumulated = 2
            job.mark_fault()
        functional.cross_entropy(model(inputs), labels).backward()  # <- seen here
        if (batch + 1) % accumulated == 0:
            optimizer.step()  # <- the fault
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
