"""Ranks use different variables for one broadcast.

Nothing is wrong: tensors are matched by order, not by name.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in job.batches():
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if rank == 0:
            learning_rates = torch.tensor([0.1, 0.01])
            dist.broadcast(learning_rates, src=0)
        else:
            received = torch.empty(2)
            dist.broadcast(received, src=0)
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
