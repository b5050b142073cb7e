"""The loss of one rank is not finite, once.

In real life: an empty batch or mask, a logarithm of zero, an overflow in half precision. What you see: the loss is NaN
on all ranks from the next step on, because all have averaged this rank's gradient, and nothing says whose it was.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches(job.LONG)):
        loss = functional.cross_entropy(model(inputs), labels)
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            loss = loss / 0  # <- the fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
