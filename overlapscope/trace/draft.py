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
from overlapscope.trace.checksum import json_text, read_json_text
from overlapscope.trace.log import Problem
from overlapscope.trace.own_files import DRAFT_PREFIX, locked, remove_drafts
from overlapscope.trace.part import Part
from overlapscope.trace.store import part_file
from overlapscope.trace.table_file import TableFile, read_whole

_PARTS_FOLDER: Final = "parts"


@dataclass(frozen=True, kw_only=True, eq=False)
class Converted:
    """Data of some ranks whose event tables are on disk."""

    parts: list[Part]
    """Shards without their event tables."""
    files: dict[str, TableFile]
    problems: list[Problem]
    by_clock: dict[str, pd.DataFrame]
    """All-reduces by clock, see ``alignment.all_reduces_of``."""


@contextmanager
def draft_beside(path: Path, made_from: str | None = None) -> Iterator[Path]:
    """Create a staging directory for tables; it is removed on exit unless it has been renamed.

    Abandoned staging directories are removed.

    Args:
        made_from: fingerprint of the input; if this process is interrupted or killed, the next one with the same
            fingerprint resumes in its directory.

    Raises:
        OSError: the recording's folder can't be written.
    """
    name = None if made_from is None else DRAFT_PREFIX + sha256(made_from.encode()).hexdigest()[:16]
    remove_drafts(path, but=name)
    draft = lock = None
    if name is not None:
        draft = path / name
        draft.mkdir(mode=0o700, exist_ok=True)
        lock = locked(draft)
    if draft is None or lock is None:  # another process writes the same tables
        draft = Path(tempfile.mkdtemp(prefix=DRAFT_PREFIX, dir=path))
        lock = locked(draft)
    is_interrupted = False
    try:
        yield draft
    except (KeyboardInterrupt, SystemExit):
        is_interrupted = made_from is not None
        raise
    finally:
        if not is_interrupted:
            shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def keep(draft: Path, number: int, converted: Converted) -> None:
    """Checkpoint a shard whose event tables are written.

    Raises:
        OSError: it can't be written.
    """
    folder = draft / _PARTS_FOLDER
    folder.mkdir(exist_ok=True)
    parts = [
        {
            "clocks": [asdict(clock) for clock in part.clocks],
            "run": part.run,
            "plans": list(part.plans),
            "ranks": _write(part.ranks, folder, f"{number:04}-{place}-ranks"),
            "whole": {name: _write(table, folder, f"{number:04}-{place}-{name}") for name, table in part.whole.items()},
        }
        for place, part in enumerate(converted.parts)
    ]
    by_clock = {
        name: _write(table, folder, f"{number:04}-clock-{place}")
        for place, (name, table) in enumerate(converted.by_clock.items())
    }
    content = {
        "parts": parts,
        "files": {name: file.as_json for name, file in converted.files.items()},
        "problems": [[problem.severity, problem.message] for problem in converted.problems],
        "by_clock": [[name, file] for name, file in by_clock.items()],
    }
    unfinished = folder / f"{number:04}.json.part"
    unfinished.write_text(json_text(content), encoding="utf-8")
    unfinished.rename(_file_of(draft, number))


def kept(draft: Path, number: int) -> Converted | None:
    """Load the checkpoint of a shard; None if there is none, or if it is incomplete."""
    folder = draft / _PARTS_FOLDER
    try:
        content = read_json_text(_file_of(draft, number).read_bytes())
        return Converted(
            parts=[_part_of(part, folder) for part in content["parts"]],
            files={name: TableFile.of_json(part_file(name, number), file) for name, file in content["files"].items()},
            problems=[Problem(*problem) for problem in content["problems"]],
            by_clock={name: _read(file, folder) for name, file in content["by_clock"]},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # includes errors of pyarrow
        return None


def forget_parts(draft: Path) -> None:
    """Remove the checkpoints, which only a resumed conversion needs: all shards are finished."""
    shutil.rmtree(draft / _PARTS_FOLDER, ignore_errors=True)


def _file_of(draft: Path, number: int) -> Path:
    return draft / _PARTS_FOLDER / f"{number:04}.json"


def _part_of(content: Any, folder: Path) -> Part:
    return Part(
        ranks=_read(content["ranks"], folder),
        clocks=[RankClock(**clock) for clock in content["clocks"]],
        run=content["run"],
        tables={},
        whole={name: _read(file, folder) for name, file in content["whole"].items()},
        plans={tuple(tuple(row) for row in rows) for rows in content["plans"]},
    )


def _write(table: pd.DataFrame, folder: Path, name: str) -> list[Any]:
    path = folder / f"{name}.parquet"
    table.to_parquet(path, index=False)
    return [path.name, crc32(path.read_bytes())]


def _read(file: list[Any], folder: Path) -> pd.DataFrame:
    name, checksum = file
    return read_whole(folder / Path(name).name, checksum)
