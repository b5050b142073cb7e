"""What it costs to record a round of a sum that is made of sends and receives: microseconds of each.

    python benchmarks/rounds.py [--turns 9]

A wire whose messages go nowhere, recorded and not, in turns: so the difference is the description of the round, its
times and its record, without what its messages cost in the collective log (``benchmarks/collective_log.py``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.collectives.roles import CollectiveRole
from instrumented_ddp.recording.records import BucketRecords, SegmentTable
from instrumented_ddp.recording.steps import Steps
from instrumented_ddp.recording.timing import HostTimer
from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.wire import Message, Wire
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.schema import EVENTS_FILE, Flag

BUCKETS, ROUNDS = 200, 12
"""Those of a ring of seven ranks."""


class Silent(Wire):
    """Sends nothing, and has nothing to wait for."""

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[dist.Work]:  # noqa: ARG002
        return ()


class Recording:
    """What ``BucketSumRecorder`` needs of a recorder."""

    steps = Steps()
    is_on = is_full = True

    def __init__(self, folder: Path) -> None:
        self.collectives = CollectiveRecorder(folder, 0, TrainingPosition(), on_error=self.disable_recording)
        self.segments = SegmentTable(folder)
        self.log = EventLogWriter(folder / EVENTS_FILE)
        self.timer = HostTimer(self.log)

    def get_timer(self, device: torch.device) -> HostTimer:  # noqa: ARG002
        """Return the timer of the host."""
        return self.timer

    def disable_recording(self, error: Exception) -> None:
        """Raise it: what is not recorded makes it cheaper."""
        raise error

    def close(self) -> None:
        """Close all files."""
        self.collectives.close()
        self.segments.close()
        self.log.close()


def us_of_a_round(recording: Any, records: BucketRecords | None, buffer: torch.Tensor) -> float:
    """Return the mean of many."""
    group = dist.group.WORLD
    begin_ns = time.perf_counter_ns()
    for _ in range(BUCKETS):
        told = BucketSumRecorder("ring", records, recording)
        told.launched(group, buffer)
        wire = Silent(group, [0], told)
        for phase in ("reduce-scatter", "all-gather"):
            with wire.phase(phase, rounds=ROUNDS // 2):
                for _ in range(ROUNDS // 2):
                    wire.exchange(sends=[(buffer, 0)], receives=[(buffer, 0)])
    return (time.perf_counter_ns() - begin_ns) / (BUCKETS * ROUNDS) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="measurements of each (default: 9)")
    turns = parser.parse_args().turns
    buffer = torch.zeros(1000)
    purpose = CollectiveRole(role="bucket", bucket=0)
    what = {"index": 0, "model": 0, "plan_epoch": 0, "plan_hash": 0}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        recording = Recording(Path(folder, "rank_0"))
        records = BucketRecords(Flag.NONE, purpose, dtype="float32", elements=buffer.numel(), **what)
        recorded, bare = [], []
        for _ in range(turns):
            recorded.append(us_of_a_round(recording, records, buffer))
            bare.append(us_of_a_round(None, None, buffer))
        recording.close()
        dist.destroy_process_group()
    print(f"a round costs {np.median(recorded):.1f} us recorded, {np.median(bare):.1f} us not recorded")
    print(f"(medians of {turns} turns; recorded {min(recorded):.1f} to {max(recorded):.1f} us)")


if __name__ == "__main__":
    main()
