"""The control group of this process, version 1 or 2: its CPU quota, memory limit, swap and pressure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from instrumented_ddp.machine.source import KernelFiles, Roots, read_pressure_us
from overlapscope.trace.machine_facts import CONTROL_GROUP

_PRESSURES: Final = {
    "cpu.pressure": "cpu_pressure_us",
    "memory.pressure": "memory_pressure_us",
    "io.pressure": "io_pressure_us",
}
_NO_LIMIT_BYTES: Final = 2.0**60
_V1_NS: Final = "throttled_time"


def find_control_groups(roots: Roots) -> dict[str, Path]:
    """Return the folder of this process's group for ``cpu`` and ``memory``: the innermost that has a limit.

    In a container only the root of the hierarchy may be visible, at which the container's own group is mounted. A limit
    may also be that of a group further out, such as a pod's.
    """
    found: dict[str, Path] = {}
    with suppress(OSError):
        for line in (roots.proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in ("cpu", "memory"):
                if not controllers:
                    found.setdefault(controller, _innermost(roots.sys / "fs/cgroup", path, _V2[controller]))
                elif controller in controllers.split(","):
                    found[controller] = _innermost(roots.sys / "fs/cgroup" / controller, path, _V1[controller])
    return {controller: folder for controller, folder in found.items() if folder.is_dir()}


_V2: Final = {"cpu": "cpu.max", "memory": "memory.max"}
_V1: Final = {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes"}


def _innermost(root: Path, path: str, limit: str) -> Path:
    groups = [group for group in _outwards(root, path) if (group / limit).exists()]
    limited = [group for group in groups if _has_limit(group / limit)]
    return next(iter(limited or groups), root)


def _outwards(root: Path, path: str) -> Iterator[Path]:
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        yield folder
        if folder == root:
            return


def _has_limit(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return 0 < float(path.read_text().split()[0]) < _NO_LIMIT_BYTES
    return False


class ControlGroup:
    """A source: the group that limits the cores and the memory of this process.

    Args:
        folders: from ``find_control_groups``.
        identity: what tells it from the groups of other hosts and containers.
    """

    def __init__(self, folders: Mapping[str, Path], identity: str) -> None:
        cpu, memory = (folders.get(name) for name in ("cpu", "memory"))
        paths: dict[str, Path] = {}
        if cpu is not None:
            paths |= {name: cpu / name for name in ("cpu.stat", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")}
            paths |= {name: cpu / name for name in _PRESSURES}
        if memory is not None:
            paths |= {name: memory / name for name in (*_V2_MEMORY, *_V1_MEMORY, "memory.events", "memory.oom_control")}
        self._files = KernelFiles(paths)
        self.name = f"{CONTROL_GROUP} {identity}"
        self.label = "control group"

    def read(self) -> dict[str, float]:
        """Return its facts."""
        found = self._read_cpu()
        for file, name in (*_V2_MEMORY.items(), *_V1_MEMORY.items()):
            value = self._files.read_number(file)
            if value is not None and value < _NO_LIMIT_BYTES:
                found[name] = value
        events = self._files.read_table("memory.events") | self._files.read_table("memory.oom_control")
        for key, name in (("max", "memory_limit_hits"), ("oom_kill", "oom_kills")):
            if key in events:
                found[name] = events[key]
        for file, name in _PRESSURES.items():
            if (value := read_pressure_us(self._files.read(file))) is not None:
                found[name] = value
        return found

    def _read_cpu(self) -> dict[str, float]:
        stat = self._files.read_table("cpu.stat")
        if "nr_periods" not in stat:
            return {}
        found = {"cpu_periods": stat["nr_periods"], "cpu_throttled_periods": stat.get("nr_throttled", 0.0)}
        with suppress(ValueError, ZeroDivisionError):  # "max": no limit
            quota, period = self._files.read("cpu.max").split() or (
                self._files.read("cpu.cfs_quota_us"),
                self._files.read("cpu.cfs_period_us"),
            )
            if float(quota) > 0:
                found["cpu_quota"] = float(quota) / float(period)
        return found

    def take_events(self) -> tuple[tuple[str, float], ...]:
        """Return nothing: all of it is counted."""
        return ()

    def missing(self) -> dict[str, str]:
        """Return what this kernel or container does not show."""
        return {} if self._files.names else {"all": "no file of a control group can be read"}

    def close(self) -> None:
        """Close its files."""
        self._files.close()


_V2_MEMORY: Final = {
    "memory.current": "memory_bytes",
    "memory.peak": "memory_peak_bytes",
    "memory.max": "memory_limit_bytes",
    "memory.swap.current": "swap_bytes",
}
_V1_MEMORY: Final = {
    "memory.usage_in_bytes": "memory_bytes",
    "memory.max_usage_in_bytes": "memory_peak_bytes",
    "memory.limit_in_bytes": "memory_limit_bytes",
    "memory.failcnt": "memory_limit_hits",
}
