"""One rank runs backward under ``no_sync()`` that the others run without.

In real life: gradient accumulation that counts batches on each rank, and one rank's count is off. What you see:
nothing. Rank 1's gradients of the next step are averaged with the others' gradients of this one, and the weights
drift apart. At the end of the run: "Connection closed by peer".
"""

from contextlib import nullcontext

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        accumulates = rank == job.FAULTY_RANK and step == job.FAULT_STEP
        if accumulates:
            job.mark_fault()
        with model.no_sync() if accumulates else nullcontext():  # <- the fault
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()  # <- seen here
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
