"""Parquet tables beside a recording: its logs are decoded once, and read from here afterwards, whole or in part.

The ranks of a recording are cut into parts, each a file of every table; rows of a file are grouped by ranges of steps,
so that some steps of all ranks are read without the others. A recording that is not large has one part and one range::

    tables/contents.json            what the other files are, and what they were made from
    tables/collectives/0000.parquet
    tables/ranks.parquet            and plans, clocks, call_sites, links, user_collectives: of all ranks

Times are of the clock of each rank, and are mapped to the common clock when they are read.

The tables carry a fingerprint of the files they were made from and are made again when it no longer matches, as while a
run is still being recorded, or when they are damaged. A folder that can't be written is read without them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from overlapscope import __version__
from overlapscope.trace.checksum import json_text, read_json_text
from overlapscope.trace.format import EVENTS_FILE, FORMAT_VERSION, TABLES_FOLDER
from overlapscope.trace.log import Problem, log_position
from overlapscope.trace.memory import free_bytes
from overlapscope.trace.own_files import remove_tables
from overlapscope.trace.part import empty_tables
from overlapscope.trace.tables import TABLES, TIMES

StepRange = tuple[int, int]
"""From this step to before that one."""

EVERYTHING: Final[StepRange] = (0, 2**32)

WHOLE: Final = ("ranks", "plans", "call_sites", "links", "user_collectives", "clocks")
"""The tables that are not cut. ``clocks``: see ``assembly.maps_of``."""

CONTENTS_FILE: Final = "contents.json"
_TABLES_VERSION: Final = 9  # raise it when the columns of a table change
_FOOTER_END: Final = 8
"""Bytes: how long a footer is, and that it is one."""


class DamagedTables(Exception):  # noqa: N818 - the tables are at fault, and made again
    """Tables are not what was written: they have to be made again."""


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's errors are among them
        raise DamagedTables from error


def fingerprint(folders: Mapping[int, Path]) -> str:
    """What the tables depend on: every file of every rank, and how far each log has got."""
    marks: list[Any] = [FORMAT_VERSION, _TABLES_VERSION, __version__]
    for folder in folders.values():
        # A memory-mapped file's time of change lags behind its content: ask the log itself as well.
        marks.append(log_position(folder / EVENTS_FILE))
        try:
            marks += [_mark(file) for file in sorted(folder.iterdir())]
        except OSError as error:
            marks.append((folder.name, error.strerror))
    return json.dumps(marks)


def _mark(file: Path) -> tuple[Any, ...]:
    try:
        status = file.stat()
    except OSError:
        # A live run has just renamed it: the draft of a JSON file.
        return file.parent.name, file.name
    return file.parent.name, file.name, status.st_size, status.st_mtime_ns


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """The tables of a recording on disk. Small enough to be handed to another process."""

    folder: Path
    run: dict[str, Any]
    problems: tuple[Problem, ...]
    between: tuple[int, ...]
    """Steps at which ranges end and the next ones begin."""
    parts: tuple[dict[str, TableFile], ...]
    """By table; without those of which some ranks have no rows."""
    whole: dict[str, int]
    """The checksum of each of ``WHOLE``."""

    @property
    def ranges(self) -> list[StepRange]:
        """The steps in ranges, of each of which the tables of all ranks fit into memory."""
        edges = [EVERYTHING[0], *self.between, EVERYTHING[1]]
        return list(pairwise(edges))

    def read(self, steps: StepRange = EVERYTHING, names: Sequence[str] = TABLES) -> dict[str, pd.DataFrame]:
        """The tables that are cut, of some steps.

        Raises:
            DamagedTables: a file is gone, or not what was written.
        """
        found: dict[str, list[pa.Table]] = {name: [] for name in names}
        with _damage_told():
            for part in self.parts:
                for name in found.keys() & part.keys():
                    found[name] += _read_groups(self.folder, part[name], steps)
            tables = {name: _in_order(name, groups, steps) for name, groups in found.items()}
        pa.default_memory_pool().release_unused()
        return tables

    def read_whole(self) -> dict[str, pd.DataFrame]:
        """The tables that are not cut.

        Raises:
            DamagedTables: a file is gone, or not what was written.
        """
        with _damage_told():
            return {name: _read_whole(self.folder / f"{name}.parquet", self.whole[name]) for name in WHOLE}


def load(path: Path, expected_fingerprint: str | None) -> Stored | None:
    """The tables of a recording, or None if there are none that are up to date.

    Args:
        expected_fingerprint: None if its logs are elsewhere.
    """
    folder = path / TABLES_FOLDER
    try:
        contents = read_json_text((folder / CONTENTS_FILE).read_bytes())
        if contents["version"] != _TABLES_VERSION:
            return None
        if expected_fingerprint not in (None, contents["fingerprint"]):
            return None
        return Stored(
            folder=folder,
            run=contents["run"],
            problems=tuple(Problem(*problem) for problem in contents["problems"]),
            between=tuple(contents["between"]),
            parts=tuple(
                {name: _file_of(_file_name(name, number), part[name]) for name in TABLES if name in part}
                for number, part in enumerate(contents["parts"])
            ),
            whole=contents["whole"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_part(
    folder: Path, number: int, tables: Mapping[str, pd.DataFrame], between: Sequence[int]
) -> dict[str, TableFile]:
    """Write the tables of some ranks.

    Args:
        folder: of the tables.
        number: of the part.
        tables: ``TABLES``, by name.
        between: steps at which ranges end.

    Raises:
        OSError: they can't be written.
    """
    files = {}
    for name in (name for name in TABLES if len(tables[name])):
        (folder / name).mkdir(exist_ok=True)
        files[name] = _write_groups(folder, _file_name(name, number), tables[name], between)
    return files


def finish(
    draft: Path,
    path: Path,
    new_fingerprint: str,
    whole: Mapping[str, pd.DataFrame],
    run: dict[str, Any],
    problems: Sequence[Problem],
    between: Sequence[int],
    parts: Sequence[Mapping[str, TableFile]],
) -> None:
    """Replace the tables of a recording, all at once, by those in a draft.

    Raises:
        OSError: they can't be written, or something of the user's is among the earlier ones.
    """
    for name, table in whole.items():
        table.to_parquet(draft / f"{name}.parquet", index=False)
    contents = {
        "version": _TABLES_VERSION,
        "fingerprint": new_fingerprint,
        "run": run,
        "problems": [(problem.severity, problem.message) for problem in problems],
        "between": list(between),
        "parts": [{name: _as_json(file) for name, file in part.items()} for part in parts],
        "whole": {name: crc32((draft / f"{name}.parquet").read_bytes()) for name in whole},
    }
    (draft / CONTENTS_FILE).write_text(json_text(contents), encoding="utf-8")
    draft.chmod(0o755)
    remove_tables(path)
    draft.rename(path / TABLES_FOLDER)


def _file_name(table: str, part: int) -> str:
    return f"{table}/{part:04}.parquet"


def _as_json(file: TableFile) -> list[Any]:
    groups = [[*group.steps, group.begin, group.end, group.crc32] for group in file.groups]
    return [file.footer_begin, file.footer_crc32, groups]


def _file_of(name: str, content: Any) -> TableFile:
    footer_begin, footer_crc32, groups = content
    return TableFile(
        name=name,
        footer_begin=footer_begin,
        footer_crc32=footer_crc32,
        groups=tuple(
            Group(steps=(first, last), begin=begin, end=end, crc32=checksum)
            for first, last, begin, end, checksum in groups
        ),
    )


def _write_groups(folder: Path, name: str, table: pd.DataFrame, between: Sequence[int]) -> TableFile:
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


def _read_groups(folder: Path, file: TableFile, steps: StepRange) -> list[pa.Table]:
    """The groups of rows in which some steps are, in one table or none."""
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


def _in_order(name: str, groups: list[pa.Table], steps: StepRange) -> pd.DataFrame:
    """The rows of some steps, rank by rank."""
    if not groups:
        return empty_tables()[name]
    rows = pa.concat_tables(groups)
    groups.clear()
    step, rank = (rows.column(column).to_numpy() for column in ("step", "rank"))
    wanted = np.flatnonzero((step >= steps[0]) & (step < steps[1]))
    rank = rank[wanted]
    if (rank[1:] < rank[:-1]).any():
        wanted = wanted[np.argsort(rank, kind="stable")]
    is_all = len(wanted) == len(step) and bool((np.diff(wanted) > 0).all())
    # Column by column, because at once it would need the memory for all of them three times.
    left = {column: rows.select([column]) for column in rows.column_names}
    del rows
    found = {}
    for column, like in empty_tables()[name].items():
        values = left.pop(str(column)).to_pandas()[column]
        if isinstance(like.dtype, pd.CategoricalDtype) and values.dtype != like.dtype:
            values = values.cat.set_categories(like.dtype.categories)
        found[column] = values if is_all else values.take(wanted).reset_index(drop=True)
    return pd.DataFrame(found, copy=False)


def _read_whole(path: Path, checksum: int) -> pd.DataFrame:
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
