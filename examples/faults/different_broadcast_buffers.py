"""One rank passes broadcast_buffers=False, and the others do not.

In real life: it is turned off for SyncBatchNorm, which only some ranks were configured to use. That rank does not take
part when rank 0's buffers are sent. What you see: SIGABRT with two sizes, or a hang.
"""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def main() -> None:
    rank = job.start()
    network = nn.Sequential(nn.BatchNorm1d(job.FEATURES), job.Classifier())
    broadcasts = rank != job.FAULTY_RANK
    job.mark_fault()
    model = job.DistributedDataParallel(network, broadcast_buffers=broadcasts)  # <- the fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
