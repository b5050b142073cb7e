"""What ``benchmarks.bucket_sweep`` has measured, and the file that holds it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.quiet_machine import QUIET_CORES
from benchmarks.swept_training import WORLD_SIZE, Partition, Setting
from overlapscope.lab.network.link import LinkMeasurement


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to fill the buckets, and by which DDP."""

    settings: tuple[Setting, ...]
    """All that lead to it."""
    buckets: Partition
    bucket_bytes: tuple[int, ...]
    step_ns: NDArray[np.int64]
    """(blocks, steps): every step's time."""
    cores_of_others: tuple[float, ...]
    """In each block, how many cores were busy with what is not the training."""

    @property
    def label(self) -> str:
        """Return its settings, the caps among them as a range."""
        caps = [setting.bucket_cap_mb for setting in self.settings if setting.bucket_cap_mb is not None]
        others = [setting.label for setting in self.settings if setting.bucket_cap_mb is None]
        views = ", views" if self.settings[0].gradient_as_bucket_view else ""
        span = [f"{caps[0]:g}{views}" if len(caps) == 1 else f"{caps[0]:g} to {caps[-1]:g}{views}"] if caps else []
        return "; ".join(others + span)

    @property
    def quiet_step_ns(self) -> NDArray[np.int64]:
        """Return (blocks, steps) of the blocks that count: the quiet ones; if none was, the quietest."""
        cores = np.array(self.cores_of_others)
        return self.step_ns[cores <= max(QUIET_CORES, cores.min())]

    @property
    def is_ours(self) -> bool:
        """Return whether it is our DDP's."""
        return self.settings[0].is_ours

    @property
    def median_ms(self) -> float:
        """Return the step time."""
        return float(np.median(self.quiet_step_ns)) / 1e6

    @property
    def noise(self) -> float:
        """Return the difference of the medians of odd and even blocks, as a share of the median; NaN with one block."""
        step_ns = self.quiet_step_ns
        if len(step_ns) < 2:
            return math.nan
        return float(abs(np.median(step_ns[::2]) - np.median(step_ns[1::2])) / np.median(step_ns))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All ways to fill the buckets of one model, over one link."""

    model: str
    link: str
    parameters: tuple[tuple[str, int], ...]
    """Name and bytes, by number."""
    link_check: LinkMeasurement
    measured: tuple[Measured, ...]

    def write(self, path: Path) -> None:
        """Write it to a JSON file, with medians and noise for readers that are not ``read_sweep``."""
        content = {
            "format": "overlapscope bucket sweep",
            "version": 1,
            "world_size": WORLD_SIZE,
            "backend": "gloo",
            "torch": torch.__version__,
            **asdict(self),
            "measured": [
                {
                    "label": each.label,
                    "median_ms": each.median_ms,
                    "noise": each.noise,
                    "settings": [asdict(setting) for setting in each.settings],
                    "bucket_bytes": each.bucket_bytes,
                    "buckets": each.buckets,
                    "step_ns": each.step_ns.tolist(),
                    "cores_of_others": each.cores_of_others,
                }
                for each in self.measured
            ],
        }
        path.write_text(json.dumps(content, indent=1))


def read_sweep(path: Path) -> Sweep:
    """Read what ``Sweep.write`` has written."""
    content = json.loads(path.read_text())
    measured = [
        Measured(
            settings=tuple(Setting.read(setting) for setting in each["settings"]),
            buckets=each["buckets"],
            bucket_bytes=tuple(each["bucket_bytes"]),
            step_ns=np.array(each["step_ns"]),
            cores_of_others=tuple(each["cores_of_others"]),
        )
        for each in content["measured"]
    ]
    return Sweep(
        model=content["model"],
        link=content["link"],
        parameters=tuple((name, size) for name, size in content["parameters"]),
        link_check=LinkMeasurement(**content["link_check"]),
        measured=tuple(measured),
    )
