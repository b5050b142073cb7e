"""Ranks reduce tensors of different sizes.

In real life: a tensor whose length depends on the data, such as one entry per class seen. What you see:
gloo aborts the process: SIGABRT, no Python exception, no traceback.
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
        longest = 1000
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            longest = 1001
            job.mark_fault()
        lengths = torch.zeros(longest)
        dist.all_reduce(lengths)  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
