"""L-BFGS evaluates the loss several times per update, equally often on every rank.

Nothing is wrong.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for inputs, labels in job.batches(30):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
