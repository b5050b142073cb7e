"""Two process groups are entered in different orders.

In real life: a group for tensors and one for data, or one for metrics beside DDP's, on different paths through the
code. What you see: every rank waits until the timeout, each in a collective that looks right.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, accuracies = dist.new_group(), dist.new_group()
    for step, (inputs, labels) in enumerate(job.batches()):
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        mean_loss = loss.detach().clone()
        accuracy = (logits.argmax(1) == labels).float().mean()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            dist.all_reduce(accuracy, group=accuracies)  # <- the fault
            dist.all_reduce(mean_loss, group=losses)
        else:
            dist.all_reduce(mean_loss, group=losses)  # <- seen here
            dist.all_reduce(accuracy, group=accuracies)
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
