"""One rank freezes parameters while it trains, after DDP has been told of them.

In real life: a schedule that freezes the first layers when a loss that each rank computes for itself is low enough.
What you see: rank 1's next forward fails with "Expected to have finished reduction ... indices 0 1". The others wait in
backward until the timeout, or until rank 1 exits.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    net = job.Classifier()
    model = job.DistributedDataParallel(net, bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            net.stem.requires_grad_(False)  # <- the fault
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)  # <- seen here
        loss.backward()  # <- seen here
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
