"""Ranks ask for buckets of different sizes.

Nothing is wrong: all of them use rank 0's plan.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    caps_mb = 2 * job.BUCKET_CAP_MB if rank == job.FAULTY_RANK else job.BUCKET_CAP_MB
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=caps_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
