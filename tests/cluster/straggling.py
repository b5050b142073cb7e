"""One rank of a recorded training in which a known thing may be wrong.

    RANK=0 WORLD_SIZE=4 python -m tests.cluster.straggling FOLDER --rendezvous FILE [--steps 150] [--faults JSON]

The compute is emulated: after a small real multiplication, each layer waits until its time is over. With more ranks
than cores, real compute would only measure the scheduler. Gradients, buckets, all-reduces and the optimizer are real.
Within a pass, layers end on a fixed schedule, so that what wakes up late once is on time again a layer later.

Writes FOLDER/rank_N, and FOLDER/truth_rank_N.json: the nanoseconds that each fault really took, by step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from instrumented_ddp import DistributedDataParallel
from tests.cluster.faults import Delay, GcPauses, Pause, SlowCompute, SlowData, from_json

LAYERS: Final = 8
WIDTH: Final = 256
"""Two layers just fill a bucket, so that there are four."""
BUCKET_CAP_MB: Final = 0.5
"""Small enough for a bucket to be reduced before the next is ready, also with more ranks than cores. Otherwise it is
communication that steps wait for, and slower compute would cost less than it takes."""
BATCH: Final = 4
FORWARD_NS: Final = 1_500_000
"""Of one layer."""
BACKWARD_NS: Final = 3_000_000
"""Of one layer."""
DATA_NS: Final = 1_000_000

D = TypeVar("D", SlowCompute, SlowData, GcPauses, Pause)


class Injected:
    """The faults of this rank, and how long each has really held it up.

    Args:
        delays: the faults of this rank.
    """

    def __init__(self, delays: Sequence[Delay]) -> None:
        self.step = 0
        self._taken_ns: dict[Delay, dict[int, int]] = {delay: {} for delay in delays}

    def due(self, kind: type[D]) -> list[D]:
        """The faults of one kind that strike in this step."""
        return [delay for delay in self._taken_ns if isinstance(delay, kind) and delay.strikes(self.step)]

    def note(self, delay: Delay, taken_ns: int) -> None:
        """A fault has held up this step, possibly once more."""
        by_step_ns = self._taken_ns[delay]
        by_step_ns[self.step] = by_step_ns.get(self.step, 0) + taken_ns

    @contextmanager
    def timed(self, delay: Delay) -> Iterator[None]:
        """What runs inside is a fault that holds up this step."""
        start_ns = time.monotonic_ns()
        yield
        self.note(delay, time.monotonic_ns() - start_ns)

    def write(self, path: Path) -> None:
        """Write what was taken, fault by fault."""
        truth = [
            {"kind": delay.kind} | asdict(delay) | {"steps": list(taken_ns), "extra_ns": list(taken_ns.values())}
            for delay, taken_ns in self._taken_ns.items()
        ]
        path.write_text(json.dumps(truth))


class Pace:
    """When the layers of a pass are done."""

    def __init__(self, injected: Injected) -> None:
        self._injected = injected
        self._done_ns = 0

    def begin_pass(self) -> None:
        """The layers that follow are those of a new pass, which begins now."""
        self._done_ns = time.monotonic_ns()

    def finish_layer(self, healthy_ns: int) -> None:
        """Wait until the layer is done."""
        self._wait(healthy_ns)
        for slow in self._injected.due(SlowCompute):
            extra_ns = round(slow.share * healthy_ns)
            self._wait(extra_ns)
            # By so much the schedule moves. The time slept also depends on how late the sleep began.
            self._injected.note(slow, extra_ns)

    def _wait(self, nanoseconds: int) -> None:
        self._done_ns += nanoseconds
        sleep_until(self._done_ns)


class TakeTime(torch.autograd.Function):
    """The identity, in the time of a layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace) -> torch.Tensor:
        ctx.pace = pace
        pace.finish_layer(FORWARD_NS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.pace.finish_layer(BACKWARD_NS)
        return gradient, None


class PacedModel(nn.Module):
    """Linear layers that take their time."""

    def __init__(self, pace: Pace, injected: Injected) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self._pace = pace
        self._injected = injected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same."""
        for pause in self._injected.due(Pause):
            with self._injected.timed(pause):
                time.sleep(pause.seconds)
        for collection in self._injected.due(GcPauses):
            with self._injected.timed(collection):
                gc.collect()
        self._pace.begin_pass()
        for layer in self.layers:
            x = TakeTime.apply(layer(x), self._pace)
        return x


def sleep_until(monotonic_ns: int) -> None:
    """Sleep until a time that may already be over."""
    time.sleep(max(0, monotonic_ns - time.monotonic_ns()) / 1e9)


def fetch_batch(injected: Injected) -> torch.Tensor:
    """Wait for data."""
    sleep_until(time.monotonic_ns() + DATA_NS)
    for slow in injected.due(SlowData):
        with injected.timed(slow):
            time.sleep(slow.extra_ms / 1000)
    return torch.randn(BATCH, WIDTH)


class Batches(IterableDataset[torch.Tensor]):
    """Data that a loader has to wait for."""

    def __init__(self, injected: Injected) -> None:
        self._injected = injected

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield fetch_batch(self._injected)


def keep_others_out() -> None:
    """Run before all ordinary processes, where that is allowed: they are no part of what is recorded.

    On a machine that others use as well, waking up takes most of the time of a small all-reduce.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def train(model: DistributedDataParallel, pace: Pace, injected: Injected, steps: int) -> None:
    """Run the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(Batches(injected), batch_size=None))
    for injected.step in range(steps):
        loss = model(next(batches)).square().mean()
        pace.begin_pass()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the recording and the truth go")
    parser.add_argument("--rendezvous", required=True, help="a file that does not exist yet; the same for all ranks")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--faults", type=from_json, default=[], help="of all ranks")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    delays = [delay for delay in args.faults if delay.rank == rank]
    injected = Injected(delays)
    pace = Pace(injected)
    keep_others_out()  # also the threads that are started from here on
    dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=world_size)
    model = DistributedDataParallel(PacedModel(pace, injected), bucket_cap_mb=BUCKET_CAP_MB, trace=args.folder)
    # Only the collections that are injected may take time: no others happen, and what is there by now is left out.
    gc.disable()
    gc.freeze()
    _alive = [[[] for _ in range(delay.containers)] for delay in delays if isinstance(delay, GcPauses)]
    train(model, pace, injected, args.steps)
    injected.write(args.folder / f"truth_rank_{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
