"""One rank ends with an exception.

In real life: a label out of range, a missing file. What you see: with luck the exception is the
first of many that the launcher prints; the others fail with "Connection closed by peer" when rank 1 has exited.
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
            labels[0] = 10  # there are classes 0 to 9
            job.mark_fault()
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels)  # <- the fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
