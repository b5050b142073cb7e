"""One rank launches a collective that the others do not.

In real life: a metric that is reduced only where something was logged, or where it is the best so far. What you see:
the extra all-reduce is matched with the others' next one. If the sizes differ, gloo aborts the process (SIGABRT, no
Python exception, no traceback); if they are equal, every sum from then on mixes two different things.
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
        dist.all_reduce(mean_loss)
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            labels_seen = torch.bincount(labels, minlength=10).float()
            job.mark_fault()
            dist.all_reduce(labels_seen)  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
