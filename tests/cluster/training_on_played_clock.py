"""Train on one rank whose clock is played: shifted, drifting, and of another boot.

    python -m tests.cluster.training_on_played_clock RANK WORLD_SIZE FOLDER SECONDS [SHIFT_NS DRIFT BOOT]

Without the last three the clock is left as it is. Leaves ``truth_RANK.json`` in the folder, for ``real_times``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


class PlayedClock:
    """A clock that differs from the host's in a known way."""

    def __init__(self, real: Callable[[], int]) -> None:
        self._real = real
        self.turn(0, 0.0)

    def turn(self, shift_ns: int, drift: float) -> None:
        """Set it: ahead by ``shift_ns`` now, and faster by ``drift`` from here on."""
        self.begin_ns, self.shift_ns, self.drift = self._real(), shift_ns, drift

    def now_ns(self) -> int:
        """What it shows."""
        real_ns = self._real()
        return real_ns + self.shift_ns + round((real_ns - self.begin_ns) * self.drift)

    def save(self, path: Path) -> None:
        """Write how to undo it."""
        path.write_text(json.dumps([self.begin_ns, self.shift_ns, self.drift]))


def real_times(path: Path, shown_ns: np.ndarray) -> np.ndarray:
    """What the host's clock showed when a played one, saved there, showed these."""
    begin_ns, shift_ns, drift = json.loads(path.read_text())
    return begin_ns + np.rint((shown_ns - shift_ns - begin_ns) / (1 + drift)).astype(np.int64)


def train(recording: Path, seconds: float) -> None:
    """Train and record, in a process group that is there already."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from instrumented_ddp import DistributedDataParallel

    layers = [nn.Linear(256, 256) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5, trace=recording)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends_at, is_over = time.monotonic() + seconds, torch.zeros(1)
    while not is_over.item():
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        is_over[0] = time.monotonic() > ends_at
        dist.broadcast(is_over, 0)
    model.recorder.close()


def main() -> None:
    rank, world_size, folder, seconds = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    clock = PlayedClock(time.monotonic_ns)
    if len(sys.argv) > 5:
        time.monotonic_ns = clock.now_ns  # before anything of ours is imported
        clock.turn(int(sys.argv[5]), float(sys.argv[6]))
    clock.save(folder / f"truth_{rank}.json")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from instrumented_ddp import clock as recorded_clock

    if len(sys.argv) > 5:
        recorded_clock.boot_identity = lambda: sys.argv[7]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    train(folder / "traces", seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
