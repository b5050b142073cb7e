"""All ranks call ``model.module(...)`` instead of ``model(...)``, so nothing is reduced.

In real life: code written to save or evaluate a model is used to train it. What you see: nothing. Every rank trains
its own model.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        if step == job.FAULT_STEP:
            job.mark_fault()
        logits = model(inputs) if step < job.FAULT_STEP else model.module(inputs)  # <- the fault
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()  # <- seen here
        optimizer.step()  # <- seen here


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
