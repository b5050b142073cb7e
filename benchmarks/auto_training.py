"""One rank of a training with ``bucket_cap_mb="auto"``; benchmarks/auto_buckets.py starts it.

    RANK=0 WORLD_SIZE=2 python -m benchmarks.auto_training FOLDER MODEL ROUNDS IS_SLOWED [CARRIER ...]

It trains until the choice is made, and then takes turns with fixed sizes, all with our DDP and one set of weights. If
the link is to get slower, it asks for that with a file ``slow-down`` in FOLDER, waits for ``slowed``, trains until it
has chosen again, and takes turns again. Every rank leaves FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.models import share_weights, training_step
from benchmarks.swept_training import MODELS, WARM_UP_STEPS, Setting, Task, measure_block
from instrumented_ddp import DistributedDataParallel

CAPS_MB: Final = (0.1, 1, 2, 5, 10, 25, 1000)
STEPS: Final = 4
STEPS_BEFORE_SLOWER: Final = 40
_MOST_STEPS: Final = 1500
"""Until it has chosen."""


def choose(model: DistributedDataParallel, step: Callable[[], None], decisions: int) -> int:
    """Train until so many decisions were made and the plan is in force. Returns after how many steps that was."""
    for steps in range(_MOST_STEPS):
        made = torch.tensor([len(model._plans.requested_schedule.decisions)])
        dist.broadcast(made, 0)
        if made.item() >= decisions and model._reducer.plan_reason != "probe":
            return steps
        step()
    raise RuntimeError(f"no decision after {_MOST_STEPS} steps")


def take_turns(steps: list[Callable[[], None]], rounds: int, carrier_pids: Sequence[int]) -> list[dict[str, Any]]:
    """Measure blocks of steps of all, in another order in every round: number, ends in ns, cores of others."""
    task = Task(model="", settings=(), rounds=rounds, steps=STEPS, carrier_pids=tuple(carrier_pids), time_limit_s=0)
    blocks = []
    for _ in range(rounds):
        for number in torch.randperm(len(steps)).tolist():
            ends_ns, cores_of_others = measure_block(steps[number], task)
            blocks.append({"number": number, "ends_ns": ends_ns, "cores_of_others": cores_of_others})
    return blocks


def wait_for(file: Path) -> None:
    """Wait until somebody has made it."""
    while not file.exists():
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    folder, model_name, rounds, is_slowed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    workload = MODELS[model_name]()
    fixed = []
    for setting in (Setting(is_ours=True), *(Setting(bucket_cap_mb=cap, is_ours=True) for cap in CAPS_MB)):
        step = training_step(workload, DistributedDataParallel(share_weights(workload.module), **setting.arguments))
        for _ in range(WARM_UP_STEPS):
            step()
        fixed.append(step)
    model = DistributedDataParallel(share_weights(workload.module), bucket_cap_mb="auto")
    step = training_step(workload, model)
    phases = []
    for number in range(2 if is_slowed else 1):
        if number:
            for _ in range(STEPS_BEFORE_SLOWER):
                step()
            (folder / "slow-down").touch()
            wait_for(folder / "slowed")
        steps = choose(model, step, number + 1)
        decisions = [asdict(decision) for decision in model._plans.requested_schedule.decisions]
        blocks = take_turns([step, *fixed], rounds, list(map(int, sys.argv[5:])))
        phases.append({"steps": steps, "decisions": decisions, "blocks": blocks, "buckets": model.bucket_plan.buckets})
    (folder / f"{rank}.json").write_text(json.dumps(phases))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
