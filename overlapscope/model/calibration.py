"""What all-reduces were measured to take, without a training: the file that ``overlapscope calibrate`` writes.

Bandwidths are those of nccl-tests: *algbw* is bytes by time; *busbw* is that times 2(N-1)/N, what each link carries if
the algorithm is a ring, and so comparable between numbers of ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import write_json

CALIBRATION_FILE: Final = "calibration.json"
"""Its name in the folder of a recording."""

_FORMAT: Final = "overlapscope calibration"
_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class AllReduceSample:
    """All-reduces of one size."""

    bytes: int
    """Of each."""
    times_ns: tuple[int, ...]
    """From the last rank's launch to the end, a measurement each."""

    @property
    def time_ns(self) -> float:
        """The median."""
        return float(np.median(self.times_ns))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A sweep of all-reduces over one process group."""

    backend: str
    device: str
    """Where the tensors were: ``cpu``, or the name of a GPU."""
    hosts: tuple[str, ...]
    """By rank."""
    samples: tuple[AllReduceSample, ...]

    @property
    def world_size(self) -> int:
        """How many ranks took part."""
        return len(self.hosts)


def algbw_gb_per_s(size_bytes: int, time_ns: float) -> float:
    """Bytes by time, in 10⁹ bytes a second."""
    return size_bytes / time_ns


def busbw_gb_per_s(size_bytes: int, time_ns: float, world_size: int) -> float:
    """What each link carries in an all-reduce by a ring, in 10⁹ bytes a second."""
    return algbw_gb_per_s(size_bytes, time_ns) * 2 * (world_size - 1) / world_size


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write it; a file of this name is replaced.

    Raises:
        OverlapScopeError: the file can't be written.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "backend": calibration.backend,
        "device": calibration.device,
        "world_size": calibration.world_size,
        "hosts": list(calibration.hosts),
        "samples": [{"bytes": sample.bytes, "times_ns": list(sample.times_ns)} for sample in calibration.samples],
    }
    try:
        write_json(path, content)
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be written ({error.strerror})") from None


def read_calibration(path: Path) -> Calibration:
    """Read it.

    Raises:
        OverlapScopeError: the file can't be read, or is no calibration.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise OverlapScopeError(f"{path}: is no calibration; make one with 'overlapscope calibrate'")
    if content.get("version") != _VERSION:
        raise OverlapScopeError(
            f"{path}: has version {content.get('version')}, but {_VERSION} is needed; make it again"
        )
    try:
        return _calibration_of(content)
    except (KeyError, TypeError, ValueError):
        raise OverlapScopeError(f"{path}: is damaged; make it again with 'overlapscope calibrate'") from None


def _calibration_of(content: dict[str, Any]) -> Calibration:
    samples = tuple(
        AllReduceSample(
            bytes=int(sample["bytes"]),
            times_ns=tuple(int(time_ns) for time_ns in sample["times_ns"]),
        )
        for sample in content["samples"]
    )
    hosts = tuple(str(host) for host in content["hosts"])
    if len(hosts) < 2 or not samples:
        raise ValueError("nothing was measured")
    if any(min(sample.bytes, *(sample.times_ns or (0,))) <= 0 for sample in samples):
        raise ValueError("an all-reduce that was measured takes some time")
    return Calibration(backend=str(content["backend"]), device=str(content["device"]), hosts=hosts, samples=samples)
