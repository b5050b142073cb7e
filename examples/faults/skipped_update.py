"""One rank skips an optimizer step.

In real life: ``if loss.isnan(): skip``, or a gradient scaler that found an infinity on one rank only. What you
see: nothing. The gradients were averaged, but rank 1 did not use them: its weights differ from then on.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # <- seen here
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            continue  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
