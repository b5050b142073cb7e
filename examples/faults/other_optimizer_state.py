"""One rank loses the state of its optimizer.

In real life: a checkpoint without the optimizer's state on one rank, or an optimizer that is recreated there after an
error. What you see: nothing. Gradients and settings are the same on all ranks, but the momentum is not, so the updates
differ and the weights drift apart.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step, (inputs, labels) in enumerate(job.batches(job.LONG)):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            optimizer.state.clear()  # <- the fault
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
