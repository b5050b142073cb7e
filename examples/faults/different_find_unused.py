"""One rank passes find_unused_parameters=True, and the others do not.

In real life: the argument is set where a model has several heads, and one rank read another configuration. That rank
also reduces which parameters were used, and with torch's own DDP keeps its first buckets. What you see: SIGABRT with
two sizes, or a hang.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    finds_unused = rank == job.FAULTY_RANK
    job.mark_fault()
    model = job.DistributedDataParallel(job.Classifier(), find_unused_parameters=finds_unused)  # <- the fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
