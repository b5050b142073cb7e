"""Recordings on other disks than those of this machine: ``s3://bucket/run``, ``gs://...``, whatever fsspec knows.

Of these the tables are read, which a recording has once it was opened where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard, cast

from overlapscope.errors import OverlapScopeError


def is_url(place: str) -> bool:
    """Whether a user means another disk than those of this machine."""
    return "://" in place


def recording_at(place: str) -> Path:
    """The folder that a user names, by its path or its URL.

    Returns:
        Of a URL an object that has the methods of a path which readers of tables use.

    Raises:
        OverlapScopeError: nothing is known of this kind of URL.
    """
    if not is_url(place):
        return Path(place)
    try:
        from upath import UPath
    except ImportError:
        raise OverlapScopeError(f"{place}: reading URLs needs 'pip install overlapscope[remote]'") from None
    try:
        return cast(Path, UPath(place))
    except (ValueError, ImportError) as error:
        raise OverlapScopeError(f"{place}: {' '.join(str(error).split())}") from None


def is_remote(path: Path | str) -> TypeGuard[Path]:
    """Whether a folder is on another disk."""
    return not isinstance(path, (Path, str))
