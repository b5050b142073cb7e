"""Each rank keeps the optimizer's state of a part of the parameters, updates these, and sends them to the others.

Nothing is wrong: the settings of the optimizers are of different parameters on each rank, and the weights are the same.
"""

import job
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional


def main() -> None:
    job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.STEPS)
    for inputs, labels in job.batches():
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
