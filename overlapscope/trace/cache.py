"""Cache of a recording's tables as Parquet files: logs are decoded once, and tables read later, whole or in part.

The ranks of a recording are split into shards, with one file per table and shard; rows of a file are grouped by ranges
of steps, so that some steps of all ranks can be read without the others. A recording that is not large has one shard
and one range::

    tables/contents.json            description of the other files, and a fingerprint of their sources
    tables/collectives/0000.parquet
    tables/ranks.parquet            and plans, clocks, call_sites, links, machine ...: of all ranks

Times are those of each rank's clock, and are mapped to the common clock on reading.

The tables have a fingerprint of their source files. They are rebuilt when it no longer matches, such as while a run is
still being recorded, or when they are damaged. A folder that isn't writable is read without them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa

from overlapscope import __version__
from overlapscope.errors import Problem
from overlapscope.trace.clock_alignment import RankClock
from overlapscope.trace.event_log import read_log_position
from overlapscope.trace.folders import STAGING_PREFIX, remove_stale_staging_dirs, remove_tables, try_lock
from overlapscope.trace.json_files import dump_json_text, parse_json_text, write_json
from overlapscope.trace.regular_file import read_regular_file
from overlapscope.trace.schema import EVENTS_FILE, FORMAT_VERSION, TABLES_FOLDER
from overlapscope.trace.table_file import ALL_STEPS, StepRange, TableFile, read_groups, read_table_file, write_groups
from overlapscope.trace.tables import TABLES, Shard, empty_tables

UNSPLIT_TABLES: Final = (
    *("ranks", "plans", "call_sites", "links", "machine", "machine_sources"),
    *("modes", "user_collectives", "clocks"),
)
"""Tables that are not split. ``clocks``: see ``load.build_clock_maps``."""

CONTENTS_FILE: Final = "contents.json"
_TABLES_VERSION: Final = 12  # increase it when the columns of a table change


class DamagedTables(Exception):  # noqa: N818 - a state of the tables, which are rebuilt
    """Tables differ from what was written, and have to be rebuilt."""


@contextmanager
def _raise_damaged_tables() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:  # includes errors of pyarrow
        raise DamagedTables from error


def compute_fingerprint(folders: Mapping[int, Path]) -> str:
    """Return a fingerprint of the sources of the tables: every file of every rank, and the length of each log."""
    marks: list[Any] = [FORMAT_VERSION, _TABLES_VERSION, __version__]
    for folder in folders.values():
        # A memory-mapped file's modification time lags behind its content, so the log's position is used too.
        marks.append(read_log_position(folder / EVENTS_FILE))
        try:
            with os.scandir(folder) as entries:
                marks += [_mark(folder.name, entry) for entry in sorted(entries, key=lambda entry: entry.name)]
        except OSError as error:
            marks.append((folder.name, error.strerror))
    return json.dumps(marks)


def _mark(folder: str, file: os.DirEntry[str]) -> tuple[Any, ...]:
    try:
        status = file.stat()
    except OSError:
        # A live run has just renamed it: the temporary version of a JSON file.
        return folder, file.name
    return folder, file.name, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTables:
    """Tables of a recording on disk. Small enough to be sent to another process."""

    folder: Path
    run: dict[str, Any]
    problems: tuple[Problem, ...]
    between: tuple[int, ...]
    """Steps at which ranges end and the next ones begin."""
    shards: tuple[dict[str, TableFile], ...]
    """Files of each shard by table name, without tables that have no rows in the shard."""
    unsplit: dict[str, int]
    """Checksum of each table of ``UNSPLIT_TABLES``."""

    @property
    def ranges(self) -> list[StepRange]:
        """Return the ranges of steps; the tables of all ranks fit into memory for each of them."""
        edges = [ALL_STEPS[0], *self.between, ALL_STEPS[1]]
        return list(pairwise(edges))

    def read(self, steps: StepRange = ALL_STEPS, names: Sequence[str] = TABLES) -> dict[str, pd.DataFrame]:
        """Read the split tables for a range of steps.

        Raises:
            DamagedTables: a file is missing, or differs from what was written.
        """
        found: dict[str, list[pa.Table]] = {name: [] for name in names}
        with _raise_damaged_tables():
            for shard in self.shards:
                for name in found.keys() & shard.keys():
                    found[name] += read_groups(self.folder, shard[name], steps)
            tables = {name: _in_order(name, groups, steps) for name, groups in found.items()}
        pa.default_memory_pool().release_unused()
        return tables

    def read_unsplit(self) -> dict[str, pd.DataFrame]:
        """Read the tables that are not split.

        Raises:
            DamagedTables: a file is missing, or differs from what was written.
        """
        with _raise_damaged_tables():
            return {
                name: read_table_file(self.folder / f"{name}.parquet", self.unsplit[name]) for name in UNSPLIT_TABLES
            }


def load_tables(path: Path, expected_fingerprint: str | None) -> StoredTables | None:
    """Load the description of a recording's tables; None if there are none that are up to date.

    Args:
        expected_fingerprint: fingerprint of the sources; None if the logs are elsewhere.
    """
    folder = path / TABLES_FOLDER
    try:
        contents = parse_json_text(read_regular_file(folder / CONTENTS_FILE))
        if contents["version"] != _TABLES_VERSION:
            return None
        if expected_fingerprint not in (None, contents["fingerprint"]):
            return None
        return StoredTables(
            folder=folder,
            run=contents["run"],
            problems=tuple(Problem(*problem) for problem in contents["problems"]),
            between=tuple(contents["between"]),
            shards=tuple(
                {name: TableFile.from_json(shard_file(name, number), shard[name]) for name in TABLES if name in shard}
                for number, shard in enumerate(contents["shards"])
            ),
            unsplit=contents["unsplit"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_shard(
    folder: Path, number: int, tables: Mapping[str, pd.DataFrame], between: Sequence[int]
) -> dict[str, TableFile]:
    """Write the tables of some ranks.

    Args:
        folder: folder of the tables.
        number: number of the shard.
        tables: ``TABLES``, by name.
        between: steps at which ranges end and the next ones begin.

    Raises:
        OSError: they can't be written.
    """
    files = {}
    for name in (name for name in TABLES if len(tables[name])):
        (folder / name).mkdir(exist_ok=True)
        files[name] = write_groups(folder, shard_file(name, number), tables[name], between)
    return files


def publish_tables(
    staging: Path,
    path: Path,
    new_fingerprint: str,
    unsplit: Mapping[str, pd.DataFrame],
    run: dict[str, Any],
    problems: Sequence[Problem],
    between: Sequence[int],
    shards: Sequence[Mapping[str, TableFile]],
) -> None:
    """Replace the tables of a recording, all at once, by those in a staging directory.

    Raises:
        OSError: they can't be written, or a file of the user's is among the earlier ones.
    """
    for name, table in unsplit.items():
        table.to_parquet(staging / f"{name}.parquet", index=False)
    contents = {
        "version": _TABLES_VERSION,
        "fingerprint": new_fingerprint,
        "run": run,
        "problems": [(problem.severity, problem.message) for problem in problems],
        "between": list(between),
        "shards": [{name: file.as_json for name, file in shard.items()} for shard in shards],
        "unsplit": {name: crc32((staging / f"{name}.parquet").read_bytes()) for name in unsplit},
    }
    (staging / CONTENTS_FILE).write_text(dump_json_text(contents), encoding="utf-8")
    staging.chmod(stat.S_IMODE(path.stat().st_mode) | 0o700)  # whoever may read the recording may read these
    remove_tables(path)
    staging.rename(path / TABLES_FOLDER)


def shard_file(table: str, shard: int) -> str:
    """Return the path of one table of a shard, relative to the folder of tables."""
    return f"{table}/{shard:04}.parquet"


def _in_order(name: str, groups: list[pa.Table], steps: StepRange) -> pd.DataFrame:
    """Return the rows of some steps, rank by rank."""
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
    # Column by column, because all at once would need three times their memory.
    left = {column: rows.select([column]) for column in rows.column_names}
    del rows
    found = {}
    for column, like in empty_tables()[name].items():
        values = left.pop(str(column)).to_pandas()[column]
        if isinstance(like.dtype, pd.CategoricalDtype) and values.dtype != like.dtype:
            values = values.cat.set_categories(like.dtype.categories)
        found[column] = values if is_all else values.take(wanted).reset_index(drop=True)
    return pd.DataFrame(found, copy=False)


_CHECKPOINT_FOLDER: Final = "checkpoints"


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvertedShards:
    """Data of some ranks whose event tables are on disk."""

    shards: list[Shard]
    """Shards without their event tables."""
    files: dict[str, TableFile]
    problems: list[Problem]
    by_clock: dict[str, pd.DataFrame]
    """All-reduces by clock, see ``clock_alignment.collect_all_reduces``."""


@contextmanager
def staging_dir(path: Path, source_fingerprint: str | None = None) -> Iterator[Path]:
    """Create a staging directory for tables; it is removed on exit unless it has been renamed.

    Abandoned staging directories are removed.

    Args:
        source_fingerprint: fingerprint of the sources; if this process is interrupted or killed, the next one with the
            same fingerprint resumes in its directory.

    Raises:
        OSError: the recording's folder can't be written.
    """
    name = None if source_fingerprint is None else STAGING_PREFIX + sha256(source_fingerprint.encode()).hexdigest()[:16]
    remove_stale_staging_dirs(path, except_name=name)
    staging = lock = None
    if name is not None:
        staging = path / name
        staging.mkdir(mode=0o700, exist_ok=True)
        lock = try_lock(staging)
    if staging is None or lock is None:  # another process writes the same tables
        staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=path))
        lock = try_lock(staging)
    is_interrupted = False
    try:
        yield staging
    except (KeyboardInterrupt, SystemExit):
        is_interrupted = source_fingerprint is not None
        raise
    finally:
        if not is_interrupted:
            shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def checkpoint_shard(staging: Path, number: int, converted: ConvertedShards) -> None:
    """Checkpoint a shard whose event tables are written.

    Raises:
        OSError: it can't be written.
    """
    folder = staging / _CHECKPOINT_FOLDER
    folder.mkdir(exist_ok=True)
    shards = [
        {
            "clocks": [asdict(clock) for clock in shard.clocks],
            "run": shard.run,
            "plans": list(shard.plans),
            "ranks": _write(shard.ranks, folder, f"{number:04}-{index}-ranks"),
            "unsplit": {
                name: _write(table, folder, f"{number:04}-{index}-{name}") for name, table in shard.unsplit.items()
            },
        }
        for index, shard in enumerate(converted.shards)
    ]
    by_clock = {
        name: _write(table, folder, f"{number:04}-clock-{index}")
        for index, (name, table) in enumerate(converted.by_clock.items())
    }
    content = {
        "shards": shards,
        "files": {name: file.as_json for name, file in converted.files.items()},
        "problems": [[problem.severity, problem.message] for problem in converted.problems],
        "by_clock": [[name, file] for name, file in by_clock.items()],
    }
    write_json(_checkpoint_path(staging, number), content)


def load_checkpoint(staging: Path, number: int) -> ConvertedShards | None:
    """Load the checkpoint of a shard; None if there is none, or if it is incomplete."""
    folder = staging / _CHECKPOINT_FOLDER
    try:
        content = parse_json_text(read_regular_file(_checkpoint_path(staging, number)))
        return ConvertedShards(
            shards=[_load_shard(shard, folder) for shard in content["shards"]],
            files={
                name: TableFile.from_json(shard_file(name, number), file) for name, file in content["files"].items()
            },
            problems=[Problem(*problem) for problem in content["problems"]],
            by_clock={name: _read(file, folder) for name, file in content["by_clock"]},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # includes errors of pyarrow
        return None


def drop_checkpoints(staging: Path) -> None:
    """Remove the checkpoints, which only a resumed conversion needs: all shards are finished."""
    shutil.rmtree(staging / _CHECKPOINT_FOLDER, ignore_errors=True)


def _checkpoint_path(staging: Path, number: int) -> Path:
    return staging / _CHECKPOINT_FOLDER / f"{number:04}.json"


def _load_shard(content: Any, folder: Path) -> Shard:
    return Shard(
        ranks=_read(content["ranks"], folder),
        clocks=[RankClock(**clock) for clock in content["clocks"]],
        run=content["run"],
        tables={},
        unsplit={name: _read(file, folder) for name, file in content["unsplit"].items()},
        plans={tuple(tuple(row) for row in rows) for rows in content["plans"]},
    )


def _write(table: pd.DataFrame, folder: Path, name: str) -> list[Any]:
    path = folder / f"{name}.parquet"
    table.to_parquet(path, index=False)
    return [path.name, crc32(path.read_bytes())]


def _read(file: list[Any], folder: Path) -> pd.DataFrame:
    name, checksum = file
    return read_table_file(folder / Path(name).name, checksum)
