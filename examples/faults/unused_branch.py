"""A branch of the model is skipped on one rank now and then, and DDP is told to expect it.

Nothing is wrong. With ``find_unused_parameters=True`` ranks tell each other which parameters were used, and
parameters without a gradient on one rank take part with zeros.
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
    model = job.DistributedDataParallel(
        BranchedClassifier(), bucket_cap_mb=job.BUCKET_CAP_MB, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        skips = rank == job.FAULTY_RANK and step % 3 == 0
        logits = model(inputs, use_branch=not skips)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
