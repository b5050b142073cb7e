"""One rank has one batch fewer than the others.

In real life: files are distributed to ranks and one has fewer lines, without a DistributedSampler that evens them
out. What you see: the last backward of the others hangs until the timeout, or until rank 1 exits ("Connection closed
by peer").
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = job.FAULT_STEP if rank == job.FAULTY_RANK else job.FAULT_STEP + 1
    for step, (inputs, labels) in enumerate(job.batches(steps)):
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()  # <- seen here
        optimizer.step()
        if rank == job.FAULTY_RANK and step == steps - 1:
            job.mark_fault()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
