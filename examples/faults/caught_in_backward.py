"""One rank catches an exception of its backward, and goes on with the next batch.

In real life: an ``except`` around the body of the loop that skips a batch for which there is not enough memory. What
you see: rank 1's next forward fails with "Expected to have finished reduction in the prior iteration ... parameters
that were not used in producing loss", which is not so. The others wait in backward until the timeout, or until rank 1
exits.
"""

import job
import torch
import torch.distributed as dist
from torch.nn import functional


def run_out_of_memory(_: torch.Tensor) -> None:
    """Raise the exception that a large batch may cause in the middle of a backward."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def main() -> None:
    rank = job.start()
    net = job.Classifier()
    model = job.DistributedDataParallel(net, bucket_cap_mb=job.BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(job.batches()):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        if rank == job.FAULTY_RANK and step == job.FAULT_STEP:
            net.layers[0].weight.register_hook(run_out_of_memory)
            job.mark_fault()
        try:
            loss.backward()  # <- the fault
        except torch.OutOfMemoryError as error:
            print(f"skips the batch of step {step}: {error}")
            continue
        optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
