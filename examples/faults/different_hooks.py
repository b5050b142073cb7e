"""One rank registers a communication hook that the others do not.

In real life: gradients are compressed where the configuration says so, and one rank read another one. What you see:
SIGABRT with two sizes; no error at all if the hook keeps the size.
"""

import job
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional


def main() -> None:
    rank = job.start()
    job.mark_fault()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    if rank == job.FAULTY_RANK:
        model.register_comm_hook(None, fp16_compress_hook)  # <- the fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
