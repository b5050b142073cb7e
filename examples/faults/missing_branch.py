"""A branch of the model is skipped on one rank, so its parameters get no gradient there.

In real life: stochastic depth or a mixture of experts that draws from each rank's own random numbers, or an ``if`` on
the data. What you see: rank 1's step looks fine, and its next forward fails with "Expected to have finished
reduction ... indices 4 5 6 7". The others wait in backward until the timeout, or until rank 1 exits.
"""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class BranchedClassifier(nn.Module):
    """A branch below the trunk can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 256)
        self.trunk = nn.Linear(256, 256)
        self.branch = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, *, use_branch: bool) -> torch.Tensor:
        """Map (batch, 32) to (batch, 10)."""
        x = torch.relu(self.stem(x))
        if use_branch:
            x = x + self.branch(x)
        return self.head(torch.relu(self.trunk(x)))


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(BranchedClassifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        skips = rank == job.FAULTY_RANK and step == job.FAULT_STEP
        if skips:
            job.mark_fault()
        logits = model(inputs, use_branch=not skips)  # <- the fault
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()  # <- seen here
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
