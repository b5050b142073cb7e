"""Cache of what was read of runs, in the user's own cache folder: nothing is written beside recordings of others.

``$XDG_CACHE_HOME/overlapscope/fleet``, else ``~/.cache/overlapscope/fleet``, has a small file per run. It holds a
fingerprint of the run's files, and is of no use once they have changed, or with another version of OverlapScope.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import OverlapScopeError
from overlapscope.fleet.fleet_run import FleetRun
from overlapscope.trace.cache import compute_fingerprint
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.json_files import dump_json_line, from_dict, parse_json_text
from overlapscope.trace.regular_file import read_regular_file

_VERSION: Final = 1  # increase it when what is kept of a run changes


def find_cache_folder() -> Path:
    """Return the folder of the cache, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "overlapscope" / "fleet"


def compute_run_fingerprint(path: Path) -> str:
    """Return a fingerprint of all files of a run; empty if it has no rank folders, as dumps, and is not cached."""
    try:
        folders = find_rank_folders(path)
        with os.scandir(path) as entries:
            own = sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.is_file())
    except (OverlapScopeError, OSError):
        return ""
    return sha256(f"{_VERSION} {own} {compute_fingerprint(folders)}".encode()).hexdigest()


def load_run(folder: Path, path: Path, fingerprint: str) -> FleetRun | None:
    """Return what is known of a run; None if it has changed since, or nothing is known."""
    try:
        content: dict[str, Any] = parse_json_text(read_regular_file(_file_of(folder, path)))
        if content["fingerprint"] != fingerprint:
            return None
        return from_dict(FleetRun, content["run"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def store_run(folder: Path, path: Path, fingerprint: str, run: FleetRun) -> None:
    """Keep what was read of a run; where nothing can be written, it is read again the next time."""
    file = _file_of(folder, path)
    draft = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as opened:
            opened.write(dump_json_line({"fingerprint": fingerprint, "run": asdict(run)}))
        draft.replace(file)


def _file_of(folder: Path, path: Path) -> Path:
    return folder / f"{sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
