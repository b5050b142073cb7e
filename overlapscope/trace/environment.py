"""How ``overlapscope record`` tells the training processes that it starts what to record."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.writer import DEFAULT_LIMIT_BYTES

TRACE_VARIABLE: Final = "OVERLAPSCOPE_TRACE"
"""Absolute path of the folder to record into. Not set: nothing is recorded unless the script asks for it."""

DETAIL_VARIABLE: Final = "OVERLAPSCOPE_DETAIL"
"""One of ``DETAILS``."""

LIMIT_VARIABLE: Final = "OVERLAPSCOPE_LIMIT_MB"
"""Disk space of one rank's log, a whole number of MB (1024² bytes). Not set: ``writer.DEFAULT_LIMIT_BYTES``."""

Detail = Literal["buckets", "parameters"]

DETAILS: Final[tuple[Detail, ...]] = ("buckets", "parameters")
"""Record steps, phases and buckets only, or also when the gradient of every parameter is ready."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a training process is asked to record."""

    folder: Path
    detail: Detail
    limit_bytes: int


def recording_from_environment(trace: str | Path | None) -> Recording | None:
    """What to record: into ``trace`` if the script names a folder, else where ``overlapscope record`` says.

    Returns:
        None if neither asks for a recording.

    Raises:
        OverlapScopeError: a variable has a value that makes no sense.
    """
    folder = os.environ.get(TRACE_VARIABLE) if trace is None else trace
    if not folder:
        return None
    detail = os.environ.get(DETAIL_VARIABLE, DETAILS[0])
    if detail not in DETAILS:
        raise OverlapScopeError(f"{DETAIL_VARIABLE}={detail}: unknown; give one of {', '.join(DETAILS)}")
    limit_mb = os.environ.get(LIMIT_VARIABLE)
    if limit_mb is not None and not limit_mb.isdecimal():
        raise OverlapScopeError(f"{LIMIT_VARIABLE}={limit_mb}: not a size; give a whole number of MB")
    return Recording(
        folder=Path(folder).absolute(),
        detail="parameters" if detail == "parameters" else "buckets",
        limit_bytes=DEFAULT_LIMIT_BYTES if limit_mb is None else int(limit_mb) * 1024**2,
    )
