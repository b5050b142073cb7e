"""Native code holds Python's global interpreter lock on one rank and does not return.

In real life: an extension module that waits for a lock, a disk or a device without releasing the interpreter. What
you see: the others wait until the timeout. On rank 1 no Python thread runs any more, so neither Ctrl-C nor a monitor
inside the process has any effect.
"""

import ctypes

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    rank = job.start()
    model = job.DistributedDataParallel(job.Classifier(), bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    native = ctypes.PyDLL(None)  # unlike CDLL, it keeps Python's lock during a call
    mutex = ctypes.create_string_buffer(64)
    native.pthread_mutex_lock(mutex)
    for step, (inputs, labels) in enumerate(job.batches()):
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            job.mark_fault()
            native.pthread_mutex_lock(mutex)  # <- the fault
        logits = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
