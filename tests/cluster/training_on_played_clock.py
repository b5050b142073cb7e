"""Train on ranks whose clocks are played: shifted, drifting, and of another boot.

    python -m tests.cluster.training_on_played_clock FOLDER SECONDS WORLD_SIZE RANKS [AHEAD_S]

RANKS is JSON: of each rank that this process is to start, ``[shift_ns, drift, boot]``, or null, which leaves its clock
as it is. Ranks are forked once torch is imported, and import what is ours when their clocks are played. Each leaves
``truth_RANK.json`` in the folder, for ``real_times``. With AHEAD_S they are in a time namespace of their own, whose
monotonic clock is ahead by so many seconds; that needs root.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which DDP imports, before the ranks are forked
import torch.distributed as dist
import torch.distributed.optim
from torch import nn

PR_SET_PDEATHSIG = 1
CLONE_NEWTIME = 0x80


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
    from instrumented_ddp import DistributedDataParallel

    layers = [nn.Linear(256, 256) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5, trace=recording)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends_at, is_over = time.monotonic() + seconds, torch.zeros(1)
    while not is_over.item():
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)  # computes something: cores are shared
        is_over[0] = time.monotonic() > ends_at
        dist.broadcast(is_over, 0)
    model._session.close()


def forget_what_is_ours() -> None:
    """Have it imported anew: a process that was forked may have it already, with the clock that there was then."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("instrumented_ddp", "overlapscope")]:
        del sys.modules[name]


def let_children_be_ahead(seconds: int) -> None:
    """Those that are forked from here on are in another time namespace. (``unshare --time`` needs a new program.)"""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWTIME)")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\n")


def run_rank(folder: Path, seconds: float, world_size: int, rank: int, played: tuple[int, float, str] | None) -> None:
    """The life of a rank, which ends with the process that has started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    clock = PlayedClock(time.monotonic_ns)
    if played:
        time.monotonic_ns = clock.now_ns
        forget_what_is_ours()
        clock.turn(*played[:2])
    clock.save(folder / f"truth_{rank}.json")
    from overlapscope.trace import clocks

    if played:
        clocks.get_boot_id = lambda: played[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    train(folder / "traces", seconds)
    dist.destroy_process_group()


def main() -> None:
    folder, seconds, world_size = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    if sys.argv[5:]:
        let_children_be_ahead(int(sys.argv[5]))
    ranks = [
        fork.Process(target=run_rank, args=(folder, seconds, world_size, int(rank), played))
        for rank, played in json.loads(sys.argv[4]).items()
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
