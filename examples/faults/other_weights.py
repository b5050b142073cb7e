"""One rank loads other weights after DDP has made all ranks' the same.

In real life: a checkpoint that is loaded after the wrapping, and of which one rank finds an older copy on its disk; or
rank 0 alone resumes. What you see: nothing. Gradients are averaged as ever, but they are of different weights, and the
checkpoint that rank 0 saves is of a model that nobody has trained.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    if rank == job.FAULTY_RANK:
        job.mark_fault()
        model.module.load_state_dict(job.Classifier().state_dict())  # <- the fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches(job.LONG):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
