"""The data loader of one rank hangs.

In real life: a network file system that does not answer, a download without a timeout, a lock. What you see: the
others wait in backward until the timeout; rank 1 says nothing.
"""

import time

import job
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Files(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples, of which one can't be read."""

    def __init__(self, hangs_at: int | None) -> None:
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return job.STEPS * job.BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.hangs_at:
            job.mark_fault()
            time.sleep(3600)  # <- the fault
        return torch.randn(job.FEATURES), torch.randint(job.CLASSES, ())


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hangs_at = job.FAULT_STEP * job.BATCH_SIZE if rank == job.FAULTY_RANK else None
    loader = DataLoader(Files(hangs_at), job.BATCH_SIZE)
    for inputs, labels in loader:  # <- seen here
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
