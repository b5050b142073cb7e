"""How much of the machine is busy with what is not measured, and waiting until little of it is."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

QUIET_CORES: Final = 0.2
"""Others may use so much."""
_PATIENCE_S: Final = float(os.environ.get("BENCHMARKS_PATIENCE_S", "inf"))
"""However long somebody is willing to wait: it is no longer than this."""
_LOOK_S: Final = 0.3
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuUse:
    """Since some time in the past."""

    wall_s: float
    machine_s: float
    """Of all processes, on all cores."""
    own_s: float
    """Of this process, and others that belong to what is measured."""


def cpu_use(belonging: Sequence[int] = ()) -> CpuUse:
    """Return the CPU time until now. The kernel counts other processes' in ticks of about 10 ms.

    Args:
        belonging: processes, by id, whose use counts as this one's.
    """
    user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    own_s = time.process_time() + sum(map(_cpu_s_of, belonging))
    return CpuUse(time.monotonic(), (user + nice + system) / _TICKS_PER_S, own_s)


def cores_between(before: CpuUse, after: CpuUse) -> tuple[float, float]:
    """Return how many cores were busy on average: with all processes, and with this one and those that belong to it."""
    wall_s = after.wall_s - before.wall_s
    return (after.machine_s - before.machine_s) / wall_s, (after.own_s - before.own_s) / wall_s


def wait_until_quiet(at_most_s: float) -> None:
    """Sleep until the machine has hardly been used for a moment, or for as long as one is willing to wait."""
    deadline = time.monotonic() + min(at_most_s, _PATIENCE_S)
    is_quiet = False
    while not is_quiet and time.monotonic() < deadline:
        before = cpu_use()
        time.sleep(_LOOK_S)
        is_quiet = cores_between(before, cpu_use())[0] < QUIET_CORES


def _cpu_s_of(process: int) -> float:
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system = map(int, after_name[11:13])
    return (user + system) / _TICKS_PER_S
