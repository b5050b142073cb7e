"""One rank of a training with ``fully_shard`` whose settings take turns; sharded_advice and sharded_overhead start it.

    RANK=0 WORLD_SIZE=2 python -m benchmarks.sharded_training FOLDER

FOLDER/task.json says what to do (``Task``). Every setting has a model of its own. They train in blocks of steps, in
another order in every round, so that what drifts meets all alike. Rank 0 leaves FOLDER/times.json: the wall time of
each counted step by setting, and the mean CPU time of a step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instrumented_ddp import attach

WARM_UP_STEPS: Final = 3
UNCOUNTED_STEPS: Final = 1
"""At the beginning of a block, after the steps of another setting."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is sharded."""

    depth: int | None = None
    """Units that are prefetched; None for torch's default."""
    is_async: bool = False
    reshards: bool = True
    merged: int = 1
    """Blocks that make a unit; 0 for one unit of the whole model."""

    @property
    def label(self) -> str:
        """Return its name in tables."""
        prefetch = "" if self.depth is None else f"prefetch {self.depth}"
        unit = {0: "one unit", 1: ""}.get(self.merged, f"units of {self.merged}")
        words = [unit, "async" * self.is_async, prefetch, "" if self.reshards else "keep"]
        return " ".join(filter(None, words)) or "default"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks do."""

    model: str
    settings: tuple[Setting, ...]
    rounds: int
    steps: int
    trace: str = ""
    """Where to record; empty to record nothing."""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read what ``write`` has written."""
        content = json.loads(path.read_text())
        settings = tuple(Setting(**each) for each in content.pop("settings"))
        return cls(settings=settings, **content)


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the layers to the input."""
        y: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Model(nn.Module):
    """Blocks between two layers."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all one after the other."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.last(x)
        return y


def make_model(name: str) -> tuple[Model, torch.Tensor]:
    """Return a model and its input."""
    if name == "tiny":
        return Model(nn.Linear(16, 16), [Block(16, 32) for _ in range(4)], nn.Linear(16, 4)), torch.randn(4, 16)
    if name == "mlp":
        blocks: list[nn.Module] = [Block(256, 1024) for _ in range(8)]
        return Model(nn.Linear(256, 256), blocks, nn.Linear(256, 10)), torch.randn(256, 256)
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(6)
    ]
    return Model(nn.Embedding(2000, 256), layers, nn.Linear(256, 2000)), torch.randint(0, 2000, (4, 64))


def shard(model: Model, setting: Setting) -> None:
    """Shard a model as a setting says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks: list[Any] = list(model.blocks)
    merged = setting.merged
    units = [blocks[first : first + merged] for first in range(0, len(blocks), merged)] if merged else []
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, reshard_after_forward=setting.reshards)
    fully_shard(model, mesh=mesh)
    root: Any = model
    if setting.is_async:
        root._set_unshard_async_op(True)
    if setting.depth is not None:
        for number, unit in enumerate(units):
            ahead = [other[0] for other in units[number + 1 : number + 1 + setting.depth]]
            behind = [other[0] for other in units[max(0, number - setting.depth) : number][::-1]]
            unit[0].set_modules_to_forward_prefetch(ahead)
            unit[0].set_modules_to_backward_prefetch(behind)
        root.set_modules_to_forward_prefetch([unit[0] for unit in units[: setting.depth]])


class Training:
    """A model with a setting."""

    def __init__(self, name: str, setting: Setting) -> None:
        torch.manual_seed(0)
        self.model, self.batch = make_model(name)
        shard(self.model, setting)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Run forward, backward and update."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def time_all(task: Task) -> dict[str, Any]:
    """Return the wall times of the counted steps by setting, and the mean CPU time of all, in seconds."""
    trainings = [Training(task.model, setting) for setting in task.settings]
    for training in trainings:
        for _ in range(WARM_UP_STEPS):
            training.step()
    taken_s: list[list[float]] = [[] for _ in trainings]
    cpu_s = -time.process_time()
    order = random.Random(0)
    for _ in range(task.rounds):
        for number in order.sample(range(len(trainings)), len(trainings)):
            for step in range(UNCOUNTED_STEPS + task.steps):
                start_s = time.perf_counter()
                trainings[number].step()
                if step >= UNCOUNTED_STEPS:
                    taken_s[number].append(time.perf_counter() - start_s)
    cpu_s += time.process_time()
    steps = task.rounds * len(trainings) * (UNCOUNTED_STEPS + task.steps)
    return {"wall_s": taken_s, "cpu_s": cpu_s / steps}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    task = Task.read(folder / "task.json")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{folder}/{'record' if task.trace else 'time'}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    if task.trace:
        attach(task.trace)
    times = time_all(task)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
