"""One rank skips a batch with ``continue``.

In real life: an empty or damaged batch, a NaN in the loss. What you see: nothing. From then on rank 1 is a batch
ahead: its gradients of one batch are averaged with the others' gradients of the batch before. It runs out of data
first, and the last backward of the others fails with "Connection closed by peer".
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
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            continue  # <- the fault
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()  # <- seen here
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
