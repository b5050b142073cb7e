"""Staging directory for tables that are being written; finished shards survive an interruption."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import pandas as pd

from overlapscope.trace.alignment import RankClock
from overlapscope.trace.checksum import dump_json_text, parse_json_text
from overlapscope.trace.log import Problem
from overlapscope.trace.own_files import STAGING_PREFIX, remove_stale_staging_dirs, try_lock
from overlapscope.trace.part import Shard
from overlapscope.trace.store import shard_file
from overlapscope.trace.table_file import TableFile, read_table_file

_CHECKPOINT_FOLDER: Final = "parts"


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvertedShards:
    """Data of some ranks whose event tables are on disk."""

    parts: list[Shard]
    """Shards without their event tables."""
    files: dict[str, TableFile]
    problems: list[Problem]
    by_clock: dict[str, pd.DataFrame]
    """All-reduces by clock, see ``alignment.all_reduces_of``."""


@contextmanager
def staging_dir(path: Path, source_fingerprint: str | None = None) -> Iterator[Path]:
    """Create a staging directory for tables; it is removed on exit unless it has been renamed.

    Abandoned staging directories are removed.

    Args:
        made_from: fingerprint of the input; if this process is interrupted or killed, the next one with the same
            fingerprint resumes in its directory.

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
    parts = [
        {
            "clocks": [asdict(clock) for clock in part.clocks],
            "run": part.run,
            "plans": list(part.plans),
            "ranks": _write(part.ranks, folder, f"{number:04}-{index}-ranks"),
            "whole": {
                name: _write(table, folder, f"{number:04}-{index}-{name}") for name, table in part.unsplit.items()
            },
        }
        for index, part in enumerate(converted.parts)
    ]
    by_clock = {
        name: _write(table, folder, f"{number:04}-clock-{index}")
        for index, (name, table) in enumerate(converted.by_clock.items())
    }
    content = {
        "parts": parts,
        "files": {name: file.as_json for name, file in converted.files.items()},
        "problems": [[problem.severity, problem.message] for problem in converted.problems],
        "by_clock": [[name, file] for name, file in by_clock.items()],
    }
    unfinished = folder / f"{number:04}.json.part"
    unfinished.write_text(dump_json_text(content), encoding="utf-8")
    unfinished.rename(_checkpoint_path(staging, number))


def load_checkpoint(staging: Path, number: int) -> ConvertedShards | None:
    """Load the checkpoint of a shard; None if there is none, or if it is incomplete."""
    folder = staging / _CHECKPOINT_FOLDER
    try:
        content = parse_json_text(_checkpoint_path(staging, number).read_bytes())
        return ConvertedShards(
            parts=[_load_shard(part, folder) for part in content["parts"]],
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
        unsplit={name: _read(file, folder) for name, file in content["whole"].items()},
        plans={tuple(tuple(row) for row in rows) for rows in content["plans"]},
    )


def _write(table: pd.DataFrame, folder: Path, name: str) -> list[Any]:
    path = folder / f"{name}.parquet"
    table.to_parquet(path, index=False)
    return [path.name, crc32(path.read_bytes())]


def _read(file: list[Any], folder: Path) -> pd.DataFrame:
    name, checksum = file
    return read_table_file(folder / Path(name).name, checksum)
