"""Shared parts of the fault scripts: joining the job, a small model, data. The faults are in the scripts themselves."""

import ctypes
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

if os.environ.get("OVERLAPSCOPE_LAB_DDP") == "torch":
    from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel
else:
    from instrumented_ddp import DistributedDataParallel as DistributedDataParallel

FAULTY_RANK = 1
FAULT_STEP = 12
STEPS = 40
LONG = 1500  # steps for faults that end nothing: on a busy machine looks at replicas are rarer than one in 300
BATCH_SIZE = 128
FEATURES = 32
CLASSES = 10
WIDTH = 256
BUCKET_CAP_MB = 0.25  # one layer per bucket

_TIME_LIMIT_S = 120
_PR_SET_PDEATHSIG = 1


class Classifier(nn.Module):
    """A stem, four layers and a head: six buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, features) to (batch, classes)."""
        x = torch.relu(self.stem(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def start() -> int:
    """Join the job, and return this process's rank.

    The launcher gives RANK and WORLD_SIZE, as torchrun does. The process ends itself after a while, whatever happens.
    """
    limit_process()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(**make_join_arguments(rank, world_size))
    torch.manual_seed(0)  # all ranks start with the same weights
    return rank


def limit_process() -> None:
    """End this process after two minutes, or when the lab that started it ends."""
    torch.set_num_threads(1)
    signal.alarm(_TIME_LIMIT_S)
    if "OVERLAPSCOPE_LAB_RENDEZVOUS" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def make_join_arguments(rank: int, world_size: int) -> dict[str, Any]:
    """Return arguments for ``init_process_group``: the lab's rendezvous file, or torchrun's variables."""
    rendezvous = os.environ.get("OVERLAPSCOPE_LAB_RENDEZVOUS")
    timeout_s = float(os.environ.get("OVERLAPSCOPE_LAB_TIMEOUT_S", "1800"))
    return {
        "backend": "gloo",
        "init_method": f"file://{rendezvous}" if rendezvous else "env://",
        "rank": rank,
        "world_size": world_size,
        "timeout": timedelta(seconds=timeout_s),
    }


def examples(count: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Generate points in space, labeled by their largest coordinate."""
    points = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :CLASSES].argmax(1))


def batches(steps: int = STEPS) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return this rank's share of the data, ``steps`` batches."""
    dataset = examples(steps * BATCH_SIZE * dist.get_world_size())
    return DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset))


def mark_fault() -> None:
    """Note the time of the first fault, so that the lab can measure how soon it is found."""
    folder = os.environ.get("OVERLAPSCOPE_LAB_FAULT_TIMES")
    if folder and not (file := Path(folder, os.environ["RANK"])).exists():
        file.write_text(str(time.monotonic_ns()))
