"""One rank is told that there are more ranks than there are.

In real life: a world size read from a stale file or a wrong variable on one node. What you see: rank 1 waits
in ``init_process_group`` for a rank that does not exist; the others wait for rank 1.
"""

import os

import job
import torch.distributed as dist


def main() -> None:
    job.limit_process()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == job.FAULTY_RANK:
        world_size += 1
    job.mark_fault()
    dist.init_process_group(**job.make_join_arguments(rank, world_size))  # <- the fault
    model = job.DistributedDataParallel(job.Classifier())
    model.train()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
