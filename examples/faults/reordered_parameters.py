"""The model's layers are built in a different order on one rank, and their shapes differ.

In real life: a model whose layers depend on a set, a dict of the data, or an ``if`` on the rank. What you see: stock
DDP says that params[0] has different sizes, on one rank; the other fails with "Connection closed by peer".
"""

import job
import torch.distributed as dist
from torch import nn


def main() -> None:
    rank = job.start()
    widths = {"narrow": 32, "wide": 64}
    names = sorted(widths, reverse=rank == job.FAULTY_RANK)
    network = nn.ModuleDict({name: nn.Linear(32, widths[name]) for name in names})
    job.mark_fault()
    model = job.DistributedDataParallel(network)  # <- the fault
    model.train()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
