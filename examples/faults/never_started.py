"""One rank never reaches the process group.

In real life: a node that hangs during an import or a mount, a launcher that started one process too few. What you
see: ``init_process_group`` waits, on all other ranks, until its timeout.
"""

import os
import time

import job
import torch.distributed as dist


def main() -> None:
    job.limit_process()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job.mark_fault()
    if rank == job.FAULTY_RANK:
        time.sleep(3600)  # <- the fault
    dist.init_process_group(**job.make_join_arguments(rank, world_size))  # <- seen here


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
