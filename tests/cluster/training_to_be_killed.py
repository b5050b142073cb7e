"""Start a recorded 2-rank training many times, SIGKILL rank 1 of each at a random moment of its training.

    python training_to_be_killed.py FOLDER TRIALS SECONDS...

Prints, for each trial, how many records rank 1 had begun to write when it died. Ranks are forked from this process,
which has imported torch but started no thread, so that a trial takes a moment and not the seconds of an import.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import when they are made: seconds, in each rank
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel


def train_until_killed(rank: int, folder: Path, counters: mmap.mmap) -> None:
    """Train for ever. ``counters``: records begun, and whether training is under way, as two 8-byte numbers."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    os.environ["OVERLAPSCOPE_DETAIL"] = "parameters"
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)]), bucket_cap_mb=0.01, trace=folder
    )
    log = model.recorder.log
    if rank == 1:
        append, begun, one_at_a_time = log.append, log.latest, threading.Lock()
        counters[:8] = begun.to_bytes(8, "little")

        def counted_append(*record: object) -> None:
            nonlocal begun
            with one_at_a_time:
                begun += 1
                counters[:8] = begun.to_bytes(8, "little")
                append(*record)

        log.append = model.recorder.timer.write = counted_append
        counters[8:] = (1).to_bytes(8, "little")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()


def main() -> None:
    folder, trials, *delays_s = Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])
    for trial in range(trials):
        trial_folder = folder / str(trial)
        trial_folder.mkdir()
        counters = mmap.mmap(-1, 16)
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                with contextlib.suppress(RuntimeError):  # rank 0 loses its peer
                    train_until_killed(rank, trial_folder, counters)
                os._exit(0)
            children.append(child)
        while not counters[8]:
            time.sleep(0.01)
        time.sleep(delays_s[trial])
        os.kill(children[1], signal.SIGKILL)
        os.waitpid(children[1], 0)
        print(int.from_bytes(counters[:8], "little"), flush=True)
        os.waitpid(children[0], 0)


if __name__ == "__main__":
    main()
