"""Rendezvous of the processes of a trial: how they find their rank, their task and each other."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

TASK_VARIABLE: Final = "OVERLAPSCOPE_LAB_TASK"
"""Environment variable with the task of a process, as JSON."""
STORE_TIMEOUT: Final = timedelta(days=7)
"""Timeout for ranks that wait for the next trial while others run theirs."""


def connect(*, is_host: bool = False) -> dist.TCPStore:
    """Connect to the store that all ranks of the job share: the launcher's, or that of rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=STORE_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of one rank in a trial."""

    number: int
    """Number of the trial, so that none reads what another has left in the store."""
    rank: int
    ranks: int
    backend: str
    result: str
    """File that rank 0 writes."""
    settings: dict[str, Any]

    @classmethod
    def read(cls) -> Task:
        """Read the task from the environment."""
        return cls(**json.loads(os.environ[TASK_VARIABLE]))

    def device(self) -> torch.device:
        """Select a GPU if the backend needs one."""
        if self.backend != "nccl":
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def join(self) -> None:
        """Create the process group of the trial."""
        store = dist.PrefixStore(f"process-group/{self.number}", connect())
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.ranks)

    def finish(self, result: dict[str, Any]) -> None:
        """Store the result, and leave the process group."""
        if self.rank == 0:
            Path(self.result).write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
