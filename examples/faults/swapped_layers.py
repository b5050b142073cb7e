"""Two layers of the same shape are built in a different order on one rank.

In real life: ``for name in list(set(names))``: the order of a set of strings differs in each process. What you
see: nothing at all. Gradients of one layer are averaged with those of another, and training goes on.
"""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Experts(nn.Module):
    """Parallel layers, with the sum of their outputs."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(32, 256) for name in names})
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 32) to (batch, 10)."""
        return self.head(torch.relu(self.experts["left"](x)) + torch.tanh(self.experts["right"](x)))


def main() -> None:
    rank = job.start()
    names = ["left", "right"]
    if rank == job.FAULTY_RANK:
        names.reverse()
    job.mark_fault()
    model = job.DistributedDataParallel(Experts(names), bucket_cap_mb=job.BUCKET_CAP_MB)  # <- the fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
