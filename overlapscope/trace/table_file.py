"""Parquet file of one table of some ranks, with rows grouped by ranges of steps, and a checksum for each group.

Before one is read, ``require_memory`` checks that it fits, so that a server survives whatever is put into its folder.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from overlapscope.errors import OverlapScopeError
from overlapscope.text import format_bytes
from overlapscope.trace.event_log import count_record_bytes
from overlapscope.trace.regular_file import open_regular_file, read_regular_file
from overlapscope.trace.tables import TIMES

_BYTES_PER_LOGGED: Final = 6
"""Bytes of memory per byte of event log: its tables, and what is computed from them (4.4 to 6.0 measured)."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def require_memory(path: Path, logs: Iterable[Path], share: float = 1.0) -> None:
    """Reject a recording whose event logs are too large for this machine.

    Args:
        share: fraction of the recording that is to be read.

    Raises:
        OverlapScopeError: it needs more memory than is free.
    """
    needed = estimate_memory(logs) * share
    free = free_bytes()
    if free is not None and needed > free:
        raise OverlapScopeError(
            f"{path}: takes about {format_bytes(needed)} of memory, and {format_bytes(free)} are free; choose "
            f"{'some' if share == 1 else 'fewer'} of its steps, such as 100:200, or use a larger machine"
        )


def estimate_memory(logs: Iterable[Path]) -> int:
    """Estimate the memory that a recording with these event logs needs."""
    return _BYTES_PER_LOGGED * sum(map(count_record_bytes, logs))


def free_bytes() -> int | None:
    """Return the memory that is free for this process, in bytes; None if the system doesn't say."""
    try:
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].removesuffix("kB")) * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # without a limit, the value is the word "max"
        return free
    return min(free, limit - used)


StepRange = tuple[int, int]
"""First step, and the step after the last."""

ALL_STEPS: Final[StepRange] = (0, 2**32)


def parse_step_bounds(text: str) -> tuple[int | None, int | None]:
    """Parse a range of steps, ``10:50``, ``10:`` or ``:50``, into its first step and its end.

    Raises:
        OverlapScopeError: The text is not a range of steps.
    """
    if not re.fullmatch(r"[0-9]{0,18}:[0-9]{0,18}", text):
        raise OverlapScopeError(f"{text!r} is no range of steps: give one like 10:50, 10: or :50")
    first, end = (int(edge) if edge else None for edge in text.split(":"))
    return first, end


def step_range_of_slice(first: int | None, end: int | None) -> StepRange:
    """Return the range of steps that a Python slice stands for."""
    return ALL_STEPS[0] if first is None else first, ALL_STEPS[1] if end is None else end


def with_neighbors(steps: StepRange, number: int) -> StepRange:
    """Return a range of steps extended by a number of steps at both ends."""
    return max(ALL_STEPS[0], steps[0] - number), min(ALL_STEPS[1], steps[1] + number)


_FOOTER_END: Final = 8
"""Size in bytes of the end of a Parquet file: length of the footer, and magic number."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Row group of a file: all rows of a table in a range of steps."""

    steps: StepRange
    begin: int
    """Offset of its first byte in the file."""
    end: int
    crc32: int
    """Checksum of the bytes from ``begin`` to ``end``."""


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Description of the file of one table of some ranks."""

    name: str
    """Path of the file, relative to the folder of tables."""
    footer_begin: int
    footer_crc32: int
    groups: tuple[RowGroup, ...]

    @property
    def as_json(self) -> list[Any]:
        """Return the description as JSON values; the inverse of ``from_json``."""
        groups = [[*group.steps, group.begin, group.end, group.crc32] for group in self.groups]
        return [self.footer_begin, self.footer_crc32, groups]

    @classmethod
    def from_json(cls, name: str, content: Any) -> TableFile:
        """Parse the result of ``as_json``, from an untrusted source.

        Raises:
            TypeError, ValueError: it is something else.
        """
        footer_begin, footer_crc32, groups = content
        return cls(
            name=name,
            footer_begin=footer_begin,
            footer_crc32=footer_crc32,
            groups=tuple(
                RowGroup(steps=(first, last), begin=begin, end=end, crc32=checksum)
                for first, last, begin, end, checksum in groups
            ),
        )


def write_groups(folder: Path, name: str, table: pd.DataFrame, between: Sequence[int]) -> TableFile:
    """Write rows, grouped by ranges of steps.

    Example: with ``between`` = [34] there are four groups: steps up to 32, step 33, step 34, and steps from 35 on.

    Args:
        folder: folder of the tables.
        name: path of the file in it.
        table: table with a column ``step``.
        between: steps at which ranges end and the next ones begin.

    Raises:
        OSError: they can't be written.
    """
    path = folder / name
    # The first and the last step of a range have their own groups, because they are read as neighbors of other ranges.
    edges = sorted({step + beside for step in between for beside in (-1, 0, 1)})
    group_index = (
        np.searchsorted(edges, table["step"].to_numpy(), side="right") if edges else np.zeros(len(table), np.int64)
    )
    if edges:
        order = np.argsort(group_index, kind="stable")
        table, group_index = table.iloc[order], group_index[order]
    content = pa.Table.from_pandas(table, preserve_index=False)
    kept, first = np.unique(group_index, return_index=True)
    rows = zip(first.tolist(), [*first[1:].tolist(), len(table)], strict=True)
    times = [name for name in table.columns if name in TIMES]
    with pq.ParquetWriter(
        path,
        content.schema,
        # Times are all different, but their differences are small; recurring values are encoded by a dictionary.
        compression="none",
        use_dictionary=[name for name in table.columns if name not in times],
        column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
    ) as writer:
        for begin, end in rows:
            writer.write_table(content.slice(begin, end - begin), row_group_size=end - begin)
    limits = [ALL_STEPS[0], *edges, ALL_STEPS[1]]
    with open_regular_file(path) as file:
        footer_begin = _footer_begin(file)
        found = pq.read_metadata(path)
        spans = [_span_of(found.row_group(number)) for number in range(len(kept))]
        groups = tuple(
            RowGroup(steps=(limits[at], limits[at + 1]), begin=begin, end=end, crc32=_crc32(file, begin, end))
            for at, (begin, end) in zip(kept.tolist(), spans, strict=True)
        )
        return TableFile(
            name=name,
            footer_begin=footer_begin,
            footer_crc32=_crc32(file, footer_begin, path.stat().st_size),
            groups=groups,
        )


def read_groups(folder: Path, file: TableFile, steps: StepRange) -> list[pa.Table]:
    """Read the row groups that contain some steps; the result is a list with one table, or empty.

    Raises:
        OSError: the file can't be read.
        ValueError: it differs from what was written.
    """
    wanted = [
        number for number, group in enumerate(file.groups) if group.steps[0] < steps[1] and group.steps[1] > steps[0]
    ]
    if not wanted:
        return []
    path = folder / file.name
    with open_regular_file(path) as content:
        spans = [(file.groups[number].begin, file.groups[number].end, file.groups[number].crc32) for number in wanted]
        if any(_crc32(content, begin, end) != expected for begin, end, expected in spans):
            raise ValueError("damaged")
        if _crc32(content, file.footer_begin, path.stat().st_size) != file.footer_crc32:
            raise ValueError("damaged")
        parquet = pq.ParquetFile(content)
        rows = sum(parquet.metadata.row_group(number).num_rows for number in wanted)
        _require_room(rows, parquet.metadata.num_columns)
        return [parquet.read_row_groups(wanted, use_pandas_metadata=True)]


def read_table_file(path: Path, checksum: int) -> pd.DataFrame:
    """Read a table that is not split.

    Raises:
        OSError: the file can't be read.
        ValueError: it differs from what was written.
    """
    data = read_regular_file(path)
    if crc32(data) != checksum:
        raise ValueError("damaged")
    found = pq.read_metadata(io.BytesIO(data))
    _require_room(found.num_rows, found.num_columns)
    return pd.read_parquet(io.BytesIO(data))


def _require_room(rows: int, columns: int) -> None:
    free = free_bytes()
    if free is not None and 8 * rows * columns > free:
        raise ValueError("a few bytes that become more than there is room for")


def _span_of(group: Any) -> tuple[int, int]:
    """Return the offsets of the first byte of a row group and of the byte after its last."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [
        column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset
        for column in columns
    ]
    return min(begins), max(begin + column.total_compressed_size for begin, column in zip(begins, columns, strict=True))


def _footer_begin(file: BinaryIO) -> int:
    end = file.seek(-_FOOTER_END, io.SEEK_END)
    return end - int.from_bytes(file.read(4), "little")


def _crc32(file: BinaryIO, begin: int, end: int) -> int:
    file.seek(begin)
    return crc32(file.read(end - begin))
