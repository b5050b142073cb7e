"""How ``overlapscope record`` tells the training processes that it starts what to record."""

from __future__ import annotations

from typing import Final, Literal

TRACE_VARIABLE: Final = "OVERLAPSCOPE_TRACE"
"""Absolute path of the folder to record into. Not set: nothing is recorded unless the script asks for it."""

DETAIL_VARIABLE: Final = "OVERLAPSCOPE_DETAIL"
"""One of ``DETAILS``."""

LIMIT_VARIABLE: Final = "OVERLAPSCOPE_LIMIT_MB"
"""Disk space of one rank's log, a whole number of MB (1024² bytes). Not set: ``writer.DEFAULT_LIMIT_BYTES``."""

Detail = Literal["buckets", "parameters"]

DETAILS: Final[tuple[Detail, ...]] = ("buckets", "parameters")
"""Record steps, phases and buckets only, or also when the gradient of every parameter is ready."""
