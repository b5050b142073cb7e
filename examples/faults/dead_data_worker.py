"""A worker process of one rank's data loader is killed.

In real life: workers that use too much memory, or too little shared memory in a container. What you see: "DataLoader
worker (pid 123) is killed by signal" on rank 1, and "Connection closed by peer" on the others.
"""

import os
import signal
import time

import job
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Files(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples, one of which is too much for the process that reads it."""

    def __init__(self, dies_at: int | None) -> None:
        self.dies_at = dies_at

    def __len__(self) -> int:
        return job.STEPS * job.BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.dies_at:
            time.sleep(0.5)  # the training waits for this batch by now
            job.mark_fault()
            os.kill(os.getpid(), signal.SIGKILL)  # <- the fault
        return torch.randn(job.FEATURES), torch.randint(job.CLASSES, ())


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dies_at = job.FAULT_STEP * job.BATCH_SIZE if rank == job.FAULTY_RANK else None
    loader = DataLoader(Files(dies_at), job.BATCH_SIZE, num_workers=1, prefetch_factor=1)
    for inputs, labels in loader:  # <- seen here
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
