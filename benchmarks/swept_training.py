"""One rank of a training whose bucket settings take turns; benchmarks/bucket_sweep.py starts it.

    RANK=0 WORLD_SIZE=2 python -m benchmarks.swept_training FOLDER

FOLDER/task.json says what to do (``Task``). Every setting has an instance of torch's DDP, or of ours, and all share one
set of weights. They train in blocks of steps, in another order in every round, so that what drifts meets all alike. A
block begins when the machine is quiet, if that is soon, and one during which others were busy is measured again. Every
rank leaves FOLDER/RANK.json: how the buckets of each setting are filled, and the ends of its steps on the clock that
the processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import instrumented_ddp
from benchmarks.models import (
    KNOWN_MODELS,
    LARGE_MODELS,
    SMALL_MODELS,
    TINY_MODELS,
    Workload,
    share_weights,
    training_step,
)
from benchmarks.quiet_machine import QUIET_CORES, cores_between, cpu_use, wait_until_quiet

WORLD_SIZE: Final = 2
MODELS: Final = TINY_MODELS | SMALL_MODELS | LARGE_MODELS | KNOWN_MODELS
WARM_UP_STEPS: Final = 3
"""Of each instance. DDP rebuilds its buckets in the second step."""
UNCOUNTED_STEPS: Final = 1
"""At the beginning of a block, after the steps of another instance."""
LONGEST_WAIT_S: Final = 8
"""For a quiet machine, before a block."""

Partition = list[list[int]]
"""Parameters by number, of each bucket in the order in which they are launched."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How DDP is told to fill buckets. Nothing given is its default."""

    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    bucket_plan: str | None = None
    """A file. Only our DDP takes it."""
    gradient_as_bucket_view: bool | None = None
    is_ours: bool = False
    """Our DDP, which records nothing, instead of torch's."""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Setting:
        """Read it from what ``dataclasses.asdict`` and JSON have made of one."""
        caps = content["bucket_cap_mb_list"]
        return cls(**{**content, "bucket_cap_mb_list": None if caps is None else tuple(caps)})

    @property
    def label(self) -> str:
        """Return its name in tables: ``default``, ``5``, ``list`` or ``our DDP, plan``."""
        if self.bucket_plan is not None:
            how = "plan"
        elif self.bucket_cap_mb_list is not None:
            how = "list"
        else:
            how = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}"
        how += ", views" if self.gradient_as_bucket_view else ""
        return f"our DDP, {how}" if self.is_ours else how

    @property
    def wrapper(self) -> tuple[bool, bool]:
        """Return what matters beside the buckets: whose DDP it is, and whether gradients are views of buckets."""
        return self.is_ours, bool(self.gradient_as_bucket_view)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments for DDP."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if name != "is_ours"}
        return {name: value for name, value in given.items() if value is not None}


class Block(NamedTuple):
    """Some steps of one setting."""

    number: int
    """Of the distinct wrapper and partition, in the order of the settings."""
    cores_of_others: float
    """That were busy meanwhile."""
    ends_ns: list[int]
    """Of the last step before it, and of its steps."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks do."""

    model: str
    settings: tuple[Setting, ...]
    rounds: int
    """Quiet blocks wanted of each setting."""
    steps: int
    """Of each block that count."""
    carrier_pids: tuple[int, ...]
    """Processes that carry packets between the ranks, by id. They may be busy in a quiet block."""
    time_limit_s: float
    """After which no further block begins, if all settings have had one."""

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read it from a JSON file that ``write`` has written."""
        content = json.loads(path.read_text())
        carrier_pids = tuple(content.pop("carrier_pids"))
        settings = tuple(map(Setting.read, content.pop("settings")))
        return cls(settings=settings, carrier_pids=carrier_pids, **content)

    def write(self, path: Path) -> None:
        """Write it to a JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self)))


def warmed_up(workload: Workload, setting: Setting) -> tuple[Callable[[], None], Partition]:
    """Return a training step of a new instance that has rebuilt its buckets, and how they are filled."""
    wrapper = instrumented_ddp.DistributedDataParallel if setting.is_ours else DistributedDataParallel
    model = wrapper(share_weights(workload.module), **setting.arguments)
    step = training_step(workload, model)
    for _ in range(WARM_UP_STEPS):
        step()
    if isinstance(model, instrumented_ddp.DistributedDataParallel):
        return step, [list(bucket) for bucket in model.bucket_plan.buckets]
    buckets = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"].split(", ")
    return step, [[int(number) for number in bucket.split()] for bucket in buckets]


def measure(task: Task) -> tuple[list[Partition], list[Block]]:
    """Have the settings take turns. All ranks call this together.

    Returns:
        Partitions of all settings, and the blocks in the order in which they were measured, as this rank saw them.
        Settings with the wrapper and the partition of one before are not measured again.
    """
    torch.manual_seed(0)
    workload = MODELS[task.model]()
    steps: dict[str, Callable[[], None]] = {}
    partitions = []
    for setting in task.settings:
        step, partition = warmed_up(workload, setting)
        steps.setdefault(json.dumps([setting.wrapper, partition]), step)
        partitions.append(partition)
    distinct = list(steps.values())
    blocks: list[Block] = []
    of_each = [[0, 0] for _ in distinct]  # quiet blocks, blocks
    begun = time.monotonic()
    while min(of_each)[0] < task.rounds and (len(blocks) < len(distinct) or _is_earlier(begun + task.time_limit_s)):
        number = min(torch.randperm(len(distinct)).tolist(), key=of_each.__getitem__)
        ends_ns, cores_of_others = measure_block(distinct[number], task)
        blocks.append(Block(number, cores_of_others, ends_ns))
        of_each[number][0] += cores_of_others < QUIET_CORES
        of_each[number][1] += 1
    return partitions, blocks


def measure_block(step: Callable[[], None], task: Task) -> tuple[list[int], float]:
    """Measure the ends of some steps in ns, from the last one before them on, and the cores that others have used."""
    is_first = dist.get_rank() == 0
    if is_first:
        wait_until_quiet(LONGEST_WAIT_S)
    belonging = task.carrier_pids if is_first else ()
    dist.barrier()
    for _ in range(UNCOUNTED_STEPS):
        step()
    before, ends_ns = cpu_use(belonging), [time.monotonic_ns()]
    for _ in range(task.steps):
        step()
        ends_ns.append(time.monotonic_ns())
    machine, own = cores_between(before, cpu_use(belonging))
    cores = torch.tensor([machine / dist.get_world_size(), own])
    dist.all_reduce(cores)  # so that all ranks decide alike
    return ends_ns, float(cores[0] - cores[1])


def _is_earlier(deadline: float) -> bool:
    """Whether it is earlier than that on rank 0, for all ranks."""
    answer = torch.tensor([int(time.monotonic() < deadline)])
    dist.broadcast(answer, 0)
    return bool(answer)


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    partitions, blocks = measure(Task.read(folder / "task.json"))
    (folder / f"{rank}.json").write_text(json.dumps({"partitions": partitions, "blocks": blocks}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
