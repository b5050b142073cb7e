"""Importer of NCCL Inspector dumps: a calibration, that is the durations of a job's all-reduces by size.

The plugin (``ext-profiler/inspector`` in NCCL's sources) writes a line of JSON for every collective of every
communicator and rank: its bytes, and how long its kernel ran. It has no steps, phases or launches, so there can be no
step-time breakdown. But the shortest duration of an all-reduce over all ranks is that of the rank that arrived last,
from its arrival to the end, which is what ``overlapscope calibrate`` measures.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from overlapscope.bucket_model.calibration import AllReduceSample, Calibration
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of
from overlapscope.trace.regular_file import open_regular_file

_GZIP: Final = b"\x1f\x8b"
_FORMAT_VERSION_KEY: Final = b'"inspector_output_format_version"'
_LONGEST_LINE_BYTES: Final = 1 << 20
_KERNEL_TIMING_SOURCES: Final = ("kernel_gpu", "kernel_cpu")
"""Timing sources we accept. The third, ``collective_cpu``, is the duration of the call, which does not wait."""
_NS_PER_US: Final = 1000


@dataclass
class _AllReduce:
    bytes: int
    time_us: float
    """Shortest duration over the ranks read so far."""
    ranks: int = 1
    """Number of ranks that have it in their dump."""
    has_same_size: bool = True
    """True if all these ranks have the same number of bytes."""


@dataclass
class _Communicator:
    ranks: int
    hosts: dict[int, str] = field(default_factory=dict)
    all_reduces: dict[int, _AllReduce] = field(default_factory=dict)
    """All-reduces by sequence number."""

    @property
    def complete(self) -> list[_AllReduce]:
        """Return the all-reduces that are in the dumps of all ranks, with the same size."""
        return [each for each in self.all_reduces.values() if each.ranks == self.ranks and each.has_same_size]


class _InspectorDumps:
    """The content of several dumps, by communicator."""

    def __init__(self) -> None:
        self.communicators: dict[str, _Communicator] = {}
        self.untimed_all_reduces = 0
        """Number of all-reduces whose kernel was not timed."""
        self.damaged_lines = 0
        """Number of unreadable lines, such as the one that was being written when the process ended."""
        self._path_by_rank: dict[tuple[str, int], Path] = {}
        """File that was read for each communicator and rank."""

    def read(self, path: Path) -> None:
        """Add the all-reduces of a file.

        Raises:
            OverlapScopeError: it can't be read, is not such a dump, or is of the same rank as another one.
        """
        is_dump = False
        for line in _lines(path):
            try:
                content = orjson.loads(line)
                header, host = content["header"], str(content["metadata"]["hostname"])
                name, rank, ranks = str(header["id"]), int(header["rank"]), int(header["n_ranks"])
                perf = content.get("coll_perf", {})
                found = (int(perf["coll_sn"]), _parse_all_reduce(perf)) if perf.get("coll") == "AllReduce" else None
            except (ValueError, KeyError, TypeError, AttributeError):
                if not is_dump:
                    raise OverlapScopeError(f"{path}: not a dump of NCCL's Inspector") from None
                self.damaged_lines += 1
                continue
            is_dump = True
            if (other := self._path_by_rank.setdefault((name, rank), path)) != path:
                raise OverlapScopeError(f"{path} and {other} are both of rank {rank} of communicator {name}")
            communicator = self.communicators.setdefault(name, _Communicator(ranks))
            communicator.hosts[rank] = host
            if found is not None:
                self._add(communicator, *found)
        if not is_dump:
            raise OverlapScopeError(f"{path}: empty")

    def _add(self, communicator: _Communicator, number: int, one: _AllReduce | None) -> None:
        if one is None:
            self.untimed_all_reduces += 1
            return
        known = communicator.all_reduces.setdefault(number, one)
        if known is not one:
            known.ranks += 1
            known.time_us = min(known.time_us, one.time_us)
            known.has_same_size &= known.bytes == one.bytes


def read_inspector_dumps(
    paths: Sequence[Path], progress: Callable[[int, int], None] | None = None
) -> tuple[Calibration, tuple[str, ...]]:
    """Read the all-reduces of the largest communicator for which the dumps of all ranks are given.

    Args:
        paths: dumps of all ranks, which may be compressed with gzip.
        progress: called with (files read so far, files in total).

    Returns:
        The calibration, and descriptions of what was left out.

    Raises:
        OverlapScopeError: a file can't be read or is not such a dump, two are of the same rank, or no all-reduce is in
            the dumps of all ranks.
    """
    dumps = _InspectorDumps()
    for number, path in enumerate(paths):
        dumps.read(path)
        if progress:
            progress(number + 1, len(paths))
    several = (each for each in dumps.communicators.values() if each.ranks > 1 and each.complete)
    chosen = max(several, key=lambda each: (each.ranks, len(each.complete)), default=None)
    if chosen is None:
        raise OverlapScopeError(_explain_no_all_reduce(dumps))
    return _calibration_of(chosen), tuple(_describe_left_out(dumps, chosen))


def is_inspector_dump(path: Path) -> bool:
    """Return whether a file begins like a dump of NCCL's Inspector."""
    try:
        return _FORMAT_VERSION_KEY in next(_lines(path), b"")
    except OverlapScopeError:
        return False


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular_file(path) as raw:
            is_compressed = raw.peek(2)[:2] == _GZIP
            with gzip.open(raw) if is_compressed else raw as file:
                while line := file.readline(_LONGEST_LINE_BYTES):
                    if line.strip():
                        yield line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return  # truncated: the lines before are complete
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None


def _parse_all_reduce(perf: dict[str, Any]) -> _AllReduce | None:
    """Parse an all-reduce; None if its duration is not that of its kernel.

    Raises:
        KeyError, TypeError, ValueError: its duration or size is missing or invalid.
    """
    size, time_us = int(perf["coll_msg_size_bytes"]), float(perf["coll_exec_time_us"])
    if not (math.isfinite(time_us) and time_us >= 0 and size >= 0):
        raise ValueError("no all-reduce takes that long, or is that large")
    if perf.get("coll_timing_source", _KERNEL_TIMING_SOURCES[0]) not in _KERNEL_TIMING_SOURCES or not size:
        return None
    return _AllReduce(bytes=size, time_us=max(1.0, time_us))


def _calibration_of(communicator: _Communicator) -> Calibration:
    times_ns: dict[int, list[int]] = defaultdict(list)
    for each in communicator.complete:
        times_ns[each.bytes].append(round(_NS_PER_US * each.time_us))
    return Calibration(
        backend="nccl",
        device="unknown",
        hosts=tuple(communicator.hosts.get(rank, "unknown") for rank in range(communicator.ranks)),
        samples=tuple(AllReduceSample(bytes=size, times_ns=tuple(times_ns[size])) for size in sorted(times_ns)),
    )


def _explain_no_all_reduce(dumps: _InspectorDumps) -> str:
    several = (each for each in dumps.communicators.values() if each.ranks > 1 and each.all_reduces)
    largest = max(several, key=lambda each: each.ranks, default=None)
    if largest is None:
        what = " whose kernel was timed" if dumps.untimed_all_reduces else ""
        return f"no all-reduce of several ranks is in these dumps{what}"
    if len(largest.hosts) < largest.ranks:
        return (
            f"dumps of {len(largest.hosts)} of {largest.ranks} ranks were given; an all-reduce takes as long as on the "
            "rank that comes last, so give those of all"
        )
    return "no all-reduce is in the dumps of all ranks"


def _describe_left_out(dumps: _InspectorDumps, chosen: _Communicator) -> Iterator[str]:
    others = sum(bool(each.all_reduces) for each in dumps.communicators.values()) - 1
    missing = len(chosen.all_reduces) - len(chosen.complete)
    counted = (
        (others, "other communicator", "with fewer ranks or all-reduces"),
        (missing, "all-reduce", "not in the dumps of all ranks, or not of one size"),
        (dumps.untimed_all_reduces, "all-reduce", "whose kernel was not timed"),
        (dumps.damaged_lines, "damaged line", ""),
    )
    for count, what, why in counted:
        if count:
            yield " ".join([count_of(count, what), *why.split()])
