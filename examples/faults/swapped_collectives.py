"""Two all-reduces of the same shape are launched in a different order on one rank.

In real life: metrics in a dict that each rank fills in its own order. What you see: nothing. Rank 1's accuracy
is added to the others' loss, and both sums are wrong on every rank.
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
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        mean_loss = loss.detach().clone()
        accuracy = (logits.argmax(1) == labels).float().mean()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            dist.all_reduce(accuracy)  # <- the fault
            dist.all_reduce(mean_loss)
        else:
            dist.all_reduce(mean_loss)
            dist.all_reduce(accuracy)
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
