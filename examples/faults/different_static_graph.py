"""One rank passes static_graph=True, and the others do not.

In real life: it is set together with activation checkpointing, which one rank has turned off. That rank reduces
nothing before its first backward is over, and which parameters were used before everything else. What you see: SIGABRT
with two sizes.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    is_static = rank == job.FAULTY_RANK
    job.mark_fault()
    model = job.DistributedDataParallel(job.Classifier(), static_graph=is_static)  # <- the fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
