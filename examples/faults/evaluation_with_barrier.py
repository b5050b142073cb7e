"""Rank 0 evaluates alone, and there is a barrier in the evaluation.

In real life: a metrics library that synchronizes implicitly, called under ``if rank == 0``. What you see: rank 0
waits in the barrier, or the barrier is matched with an all-reduce of the others: a timeout or an abort, and no cause.
"""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader


def evaluate(network: nn.Module) -> float:
    with torch.no_grad():
        right = [(network(x).argmax(1) == y).float().mean() for x, y in DataLoader(job.examples(512), 256)]
    dist.barrier()  # <- the fault
    return float(torch.stack(right).mean())


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        if rank == 0 and step == job.FAULT_STEP:
            job.mark_fault()
            evaluate(model.module)
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
