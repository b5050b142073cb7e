"""Parquet tables beside the trace: logs are decoded once and read from here afterwards.

The tables carry a fingerprint of the files they were made from and are rebuilt when it no longer matches,
as while a run is still being recorded, or when they are damaged. A folder that can't be written is read without them.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

import pandas as pd
import pyarrow.parquet as pq

from overlapscope import __version__
from overlapscope.trace.checksum import json_text, read_json_text
from overlapscope.trace.format import EVENTS_FILE, FORMAT_VERSION, TABLES_FOLDER
from overlapscope.trace.log import Problem, log_position
from overlapscope.trace.memory import free_bytes

_CONTENTS_FILE = "contents.json"
_TABLES_VERSION = 8  # raise it when the columns of a table change

Contents = tuple[dict[str, pd.DataFrame], dict[str, Any], list[Problem]]
"""Tables by name, ``run.json``, problems."""


def fingerprint(folders: dict[int, Path]) -> str:
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


def load(path: Path, expected_fingerprint: str) -> Contents | None:
    """The tables of a recording, or None if there are none that are up to date."""
    folder = path / TABLES_FOLDER
    try:
        contents = read_json_text((folder / _CONTENTS_FILE).read_bytes())
        if contents["fingerprint"] != expected_fingerprint:
            return None
        tables = {
            name: _read_table(folder / f"{name}.parquet", checksum) for name, checksum in contents["tables"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tables, contents["run"], [Problem(*problem) for problem in contents["problems"]]


def _read_table(path: Path, checksum: int) -> pd.DataFrame:
    data = path.read_bytes()
    if crc32(data) != checksum:
        raise ValueError("damaged")
    rows_and_columns = pq.read_metadata(io.BytesIO(data))
    free = free_bytes()
    if free is not None and 8 * rows_and_columns.num_rows * rows_and_columns.num_columns > free:
        raise ValueError("a few bytes that become more than there is room for")
    return pd.read_parquet(io.BytesIO(data))


def store(
    path: Path, new_fingerprint: str, tables: dict[str, pd.DataFrame], run: dict[str, Any], problems: list[Problem]
) -> None:
    """Replace the tables of a recording, all at once."""
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{TABLES_FOLDER}-", dir=path))
    except OSError:
        return
    try:
        for name, table in tables.items():
            table.to_parquet(draft / f"{name}.parquet", index=False)
        contents = {
            "fingerprint": new_fingerprint,
            "tables": {name: crc32((draft / f"{name}.parquet").read_bytes()) for name in tables},
            "run": run,
            "problems": [(problem.severity, problem.message) for problem in problems],
        }
        (draft / _CONTENTS_FILE).write_text(json_text(contents), encoding="utf-8")
        draft.chmod(0o755)
        shutil.rmtree(path / TABLES_FOLDER, ignore_errors=True)
        draft.rename(path / TABLES_FOLDER)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
