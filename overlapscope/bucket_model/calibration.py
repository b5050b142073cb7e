"""All-reduce times measured without a training: the file written by ``overlapscope calibrate``.

Bandwidths are those of nccl-tests: *algbw* is bytes over time; *busbw* is algbw times 2(N-1)/N, the load of each link
if the algorithm is a ring, which makes it comparable between world sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from overlapscope.bucket_model.observation import Spans
from overlapscope.errors import OverlapScopeError
from overlapscope.text import format_bytes, format_ns
from overlapscope.trace.json_files import from_dict, parse_json_text, write_json
from overlapscope.trace.regular_file import read_regular_file

_FORMAT: Final = "overlapscope calibration"
_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class AllReduceSample:
    """Measured all-reduces of one size."""

    bytes: int
    """Bytes of each all-reduce."""
    times_ns: tuple[int, ...]
    """Times from the last rank's launch to the end, one per measurement, in nanoseconds."""

    @property
    def time_ns(self) -> float:
        """Return the median time."""
        return float(np.median(self.times_ns))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured all-reduces of many sizes over one process group."""

    backend: str
    device: str
    """Device of the tensors: ``cpu``, or the name of a GPU."""
    hosts: tuple[str, ...]
    """Host name of each rank."""
    samples: tuple[AllReduceSample, ...]
    pairs: tuple[AllReduceSample, ...] = ()
    """Times of two all-reduces of this size each, launched together, until both have ended; for backends that run two
    at a time."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks that took part."""
        return len(self.hosts)


def algbw_gb_per_s(size_bytes: int, time_ns: float) -> float:
    """Return bytes over time, in 10⁹ bytes per second."""
    return size_bytes / time_ns


def busbw_gb_per_s(size_bytes: int, time_ns: float, world_size: int) -> float:
    """Return the load of each link in a ring all-reduce, in 10⁹ bytes per second."""
    return algbw_gb_per_s(size_bytes, time_ns) * 2 * (world_size - 1) / world_size


TABLE_HEADER: Final = f"{'size':>8} {'time':>9} {'algbw':>12} {'busbw':>12} {'times':>6}"
"""Header of the table whose rows ``format_sample`` formats."""


def format_sample(sample: AllReduceSample, world_size: int) -> str:
    """Format the all-reduces of one size as a table row."""
    algbw = algbw_gb_per_s(sample.bytes, sample.time_ns)
    busbw = busbw_gb_per_s(sample.bytes, sample.time_ns, world_size)
    return (
        f"{format_bytes(sample.bytes):>8} {format_ns(sample.time_ns):>9} {algbw:>7.3f} GB/s "
        f"{busbw:>7.3f} GB/s {len(sample.times_ns):>6}"
    )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration, replacing an existing file.

    Raises:
        OverlapScopeError: The file can't be written.
    """
    content = {"format": _FORMAT, "version": _VERSION, "world_size": calibration.world_size}
    try:
        write_json(path, content | asdict(calibration))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be written ({error.strerror})") from None


def read_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        OverlapScopeError: The file can't be read, or is not a calibration.
    """
    try:
        content = parse_json_text(read_regular_file(path))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise OverlapScopeError(f"{path}: not a calibration; make one with 'overlapscope calibrate'")
    if content.get("version") != _VERSION:
        raise OverlapScopeError(
            f"{path}: has version {content.get('version')}, but {_VERSION} is needed; make it again"
        )
    try:
        calibration = from_dict(Calibration, content)
        if calibration.world_size < 2 or not calibration.samples:
            raise ValueError("nothing was measured")
        for sample in (*calibration.samples, *calibration.pairs):
            if not sample.times_ns or min(sample.bytes, *sample.times_ns) <= 0:
                raise ValueError("an all-reduce that was measured takes some time")
    except (AttributeError, TypeError, ValueError):
        raise OverlapScopeError(f"{path}: is damaged; make it again with 'overlapscope calibrate'") from None
    return calibration


def collect_spans(samples: Sequence[AllReduceSample]) -> Spans | None:
    """Return all measurements of some samples; None if there are no samples."""
    if not samples:
        return None
    counts = [len(sample.times_ns) for sample in samples]
    return Spans(
        bytes=np.repeat([float(sample.bytes) for sample in samples], counts),
        time_ns=np.concatenate([np.asarray(sample.times_ns, dtype=np.float64) for sample in samples]),
        cycle=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
    )
