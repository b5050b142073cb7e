"""Recordings on remote storage: ``s3://bucket/run``, ``gs://...``, and other URLs that fsspec supports.

Only the tables are read there, which exist once a recording was opened where it is stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard, cast

from overlapscope.errors import OverlapScopeError


def is_url(location: str) -> bool:
    """Return whether a user's argument is a URL."""
    return "://" in location


def resolve_recording_path(location: str) -> Path:
    """Return the folder for a path or URL that a user gave.

    Returns:
        For a URL, an object with the methods of a path that readers of tables use.

    Raises:
        OverlapScopeError: this kind of URL is not supported.
    """
    if not is_url(location):
        return Path(location)
    try:
        from upath import UPath
    except ImportError:
        raise OverlapScopeError(f"{location}: reading URLs needs 'pip install overlapscope[remote]'") from None
    try:
        return cast(Path, UPath(location))
    except (ValueError, ImportError) as error:
        raise OverlapScopeError(f"{location}: {' '.join(str(error).split())}") from None


def is_remote(path: Path | str) -> TypeGuard[Path]:
    """Return whether a folder is on remote storage."""
    return not isinstance(path, (Path, str))
