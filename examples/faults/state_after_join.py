"""One rank runs out of data first, and ``join()`` leaves its momentum different.

In real life: an epoch with uneven data under ``join()``, and an optimizer with a state. What you see: nothing. When
``join()`` ends it makes the weights equal, but a rank with fewer batches has made fewer updates, so its momentum is not
that of the others, and from then on its updates differ.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(steps: int) -> None:
        for inputs, labels in job.batches(steps):
            loss = functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with model.join():
        train(job.FAULT_STEP - 5 if rank == job.FAULTY_RANK else job.FAULT_STEP)  # <- the fault
    job.mark_fault()
    train(job.LONG)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
