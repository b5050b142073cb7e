"""One rank fills the memory until it is killed.

In real life: tensors kept by mistake (``losses.append(loss)``), until the kernel's out-of-memory killer
chooses the process. What you see: "Killed" in the launcher's log, "Connection reset by peer" on the others. Here the
process kills itself, as the kernel would.
"""

import os
import signal

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK:
            kept.append(torch.ones(10_000_000))  # <- the fault
            if step == job.FAULT_STEP:
                job.mark_fault()
                os.kill(os.getpid(), signal.SIGKILL)  # <- seen here
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
