"""Rank 0 sends a tensor that rank 1 does not receive.

In real life: a pipeline whose stages count micro-batches differently. What you see: rank 0 waits until the timeout in
``send``, or, if the data fits into a buffer, the next receive gets the wrong data.
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
        activations = torch.zeros(100_000)
        if rank == 0:
            dist.send(activations, dst=1)  # <- seen here
        elif rank == 1:
            if step == job.FAULT_STEP:
                job.mark_fault()
            else:
                dist.recv(activations, src=0)  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
