"""One rank has frozen a parameter that the others train.

In real life: layers are frozen according to a checkpoint, and one rank read a different checkpoint. What you see:
"DDP expects same model across all ranks ... 11 params ... 12 params", without saying which.
"""

import job
import torch.distributed as dist


def main() -> None:
    rank = job.start()
    network = job.Classifier()
    if rank == job.FAULTY_RANK:
        network.head.bias.requires_grad_(False)
    job.mark_fault()
    model = job.DistributedDataParallel(network)  # <- the fault
    model.train()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
