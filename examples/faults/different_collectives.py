"""One rank broadcasts where the others all-reduce.

In real life: two branches of an ``if`` that were meant to do the same. What you see: all ranks wait until the timeout.
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
        mean_loss = loss.detach().clone()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            dist.broadcast(mean_loss, src=0)  # <- the fault
        else:
            dist.all_reduce(mean_loss)
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
