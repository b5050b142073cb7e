"""One rank has fewer batches than the others, and says so with ``join()``.

Nothing is wrong. A rank that has run out of data keeps taking part in the collectives of the others, with zeros.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = job.STEPS - 5 if rank == job.FAULTY_RANK else job.STEPS
    with model.join():
        for inputs, labels in job.batches(steps):
            logits = model(inputs)
            optimizer.zero_grad()
            functional.cross_entropy(logits, labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
