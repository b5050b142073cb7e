"""A collective of a subgroup is launched by only some of its members.

In real life: a condition that was meant to test membership in the group tests something else. What you see: the
members that launched it wait until the timeout.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    members = [0, 1]
    pair = dist.new_group(members)
    for step, (inputs, labels) in enumerate(job.batches()):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        mean_loss = loss.detach().clone()
        leaves_out = rank == job.FAULTY_RANK and step == job.FAULT_STEP
        if leaves_out:
            job.mark_fault()
        if rank in members and not leaves_out:  # <- the fault
            dist.all_reduce(mean_loss, group=pair)  # <- seen here
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
