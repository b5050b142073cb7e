"""A collective fails in the background, and the error is seen by others, later and elsewhere.

In real life: on NCCL every error is like this: the collective is launched, training goes on, and some time later a
thread of the backend finds that it timed out. Gloo's closest: an asynchronous all-reduce in a group with a
short timeout, whose result is only asked for much later. What you see: a timeout on the ranks that did nothing
wrong, in a line that did nothing wrong, many steps after rank 1 left out its all-reduce.
"""

from datetime import timedelta

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    background = dist.new_group(timeout=timedelta(seconds=1))
    pending = []
    for step, (inputs, labels) in enumerate(job.batches(40)):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if step == job.FAULT_STEP:
            mean_loss = loss.detach().clone()
            if rank == job.FAULTY_RANK:
                job.mark_fault()
            else:
                pending.append(dist.all_reduce(mean_loss, group=background, async_op=True))  # <- the fault
        optimizer.step()
    for work in pending:
        work.wait()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
