"""One rank makes a process group that the others do not make.

In real life: ``new_group`` under ``if rank in members``, or in a logger that only rank 0 has. All ranks of the job have
to call it, also those that are not in the group. What you see: the rank hangs in ``new_group``, and the others in a
later collective.
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
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            dist.new_group([0, 1])  # <- the fault
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
