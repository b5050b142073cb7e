"""One rank sets another learning rate than the others.

In real life: a scheduler that follows the loss of this rank's own data, or a learning rate that is read from a file or
scaled by what a rank believes the batch size to be. What you see: nothing. Gradients are the same on all ranks, the
updates are not, and the weights drift apart.
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
        optimizer.zero_grad()
        loss.backward()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            optimizer.param_groups[0]["lr"] = 0.001  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
