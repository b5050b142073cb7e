"""One table of some ranks as a Parquet file whose rows are grouped by ranges of steps, each with a checksum."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from overlapscope.trace.memory import free_bytes
from overlapscope.trace.tables import TIMES

StepRange = tuple[int, int]
"""From this step to before that one."""

EVERYTHING: Final[StepRange] = (0, 2**32)


def as_range(first: int | None, end: int | None) -> StepRange:
    """The steps of a slice of Python's."""
    return EVERYTHING[0] if first is None else first, EVERYTHING[1] if end is None else end


def with_neighbours(steps: StepRange, number: int) -> StepRange:
    """Those steps, and so many before and after them."""
    return max(EVERYTHING[0], steps[0] - number), min(EVERYTHING[1], steps[1] + number)


_FOOTER_END: Final = 8
"""Bytes: how long a footer is, and that it is one."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a file that are read together, all of a table of some steps."""

    steps: StepRange
    begin: int
    """Where they begin in the file."""
    end: int
    crc32: int
    """Of what is between."""


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """One table of some ranks."""

    name: str
    """Of the file, below the folder of tables."""
    footer_begin: int
    footer_crc32: int
    groups: tuple[Group, ...]

    @property
    def as_json(self) -> list[Any]:
        """For the contents of all tables; see ``of_json``."""
        groups = [[*group.steps, group.begin, group.end, group.crc32] for group in self.groups]
        return [self.footer_begin, self.footer_crc32, groups]

    @classmethod
    def of_json(cls, name: str, content: Any) -> TableFile:
        """The inverse of ``as_json``, of what may be anything.

        Raises:
            TypeError, ValueError: it is something else.
        """
        footer_begin, footer_crc32, groups = content
        return cls(
            name=name,
            footer_begin=footer_begin,
            footer_crc32=footer_crc32,
            groups=tuple(
                Group(steps=(first, last), begin=begin, end=end, crc32=checksum)
                for first, last, begin, end, checksum in groups
            ),
        )


def write_groups(folder: Path, name: str, table: pd.DataFrame, between: Sequence[int]) -> TableFile:
    """Write rows, those of a range of steps together.

    Args:
        folder: of the tables.
        name: of the file in it.
        table: with a column ``step``.
        between: steps at which ranges end and the next ones begin.

    Raises:
        OSError: they can't be written.
    """
    path = folder / name
    # The first and the last step of a range are apart: its neighbours are read with them, and without the rest.
    edges = sorted({step + beside for step in between for beside in (-1, 0, 1)})
    place = np.searchsorted(edges, table["step"].to_numpy(), side="right") if edges else np.zeros(len(table), np.int64)
    if edges:
        order = np.argsort(place, kind="stable")
        table, place = table.iloc[order], place[order]
    content = pa.Table.from_pandas(table, preserve_index=False)
    kept, first = np.unique(place, return_index=True)
    rows = zip(first.tolist(), [*first[1:].tolist(), len(table)], strict=True)
    times = [name for name in table.columns if name in TIMES]
    with pq.ParquetWriter(
        path,
        content.schema,
        # Of moments, which are all different, only the differences are short; of what recurs, the place in a list.
        compression="none",
        use_dictionary=[name for name in table.columns if name not in times],
        column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
    ) as writer:
        for begin, end in rows:
            writer.write_table(content.slice(begin, end - begin), row_group_size=end - begin)
    limits = [EVERYTHING[0], *edges, EVERYTHING[1]]
    with path.open("rb") as file:
        footer_begin = _footer_begin(file)
        found = pq.read_metadata(path)
        spans = [_span_of(found.row_group(number)) for number in range(len(kept))]
        groups = tuple(
            Group(steps=(limits[at], limits[at + 1]), begin=begin, end=end, crc32=_crc32(file, begin, end))
            for at, (begin, end) in zip(kept.tolist(), spans, strict=True)
        )
        return TableFile(
            name=name,
            footer_begin=footer_begin,
            footer_crc32=_crc32(file, footer_begin, path.stat().st_size),
            groups=groups,
        )


def read_groups(folder: Path, file: TableFile, steps: StepRange) -> list[pa.Table]:
    """The groups of rows in which some steps are, in one table or none.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not what was written.
    """
    wanted = [
        number for number, group in enumerate(file.groups) if group.steps[0] < steps[1] and group.steps[1] > steps[0]
    ]
    if not wanted:
        return []
    path = folder / file.name
    with path.open("rb") as content:
        spans = [(file.groups[number].begin, file.groups[number].end, file.groups[number].crc32) for number in wanted]
        if any(_crc32(content, begin, end) != expected for begin, end, expected in spans):
            raise ValueError("damaged")
        if _crc32(content, file.footer_begin, path.stat().st_size) != file.footer_crc32:
            raise ValueError("damaged")
        parquet = pq.ParquetFile(content)
        rows = sum(parquet.metadata.row_group(number).num_rows for number in wanted)
        _require_room(rows, parquet.metadata.num_columns)
        return [parquet.read_row_groups(wanted, use_pandas_metadata=True)]


def read_whole(path: Path, checksum: int) -> pd.DataFrame:
    """A table that is not cut.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not what was written.
    """
    data = path.read_bytes()
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
    """Where a group of rows is in its file."""
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
