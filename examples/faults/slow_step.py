"""One rank computes for as long as twenty steps, once.

Nothing is wrong: it is slow, not stuck.
"""

import time

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step_s = 0.0
    for step, (inputs, labels) in enumerate(job.batches()):
        began_s = time.monotonic()
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            while time.monotonic() < began_s + 20 * step_s:
                torch.linalg.qr(torch.randn(256, 256))  # augments a large image
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        step_s = time.monotonic() - began_s


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
