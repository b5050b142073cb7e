"""A bit of one weight changes on one rank.

In real life: memory or a processor that fails silently, or code that writes where it should not. What you see: nothing.
One weight differs on this rank from then on; gradients are averaged over models that are not the same.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches(job.LONG)):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            model.module.layers[1].bias.data.view(torch.int32)[7] ^= 1  # <- the fault


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
