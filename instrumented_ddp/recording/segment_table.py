"""Table of the distinct rounds of bucket sums: a number for each, and a line in ``segments.jsonl``."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from overlapscope.trace.segments import SEGMENTS_FILE, Segment

_MAX_SEGMENTS: Final = 100_000
"""Limit for a strategy whose rounds are never equal; rounds beyond it get number 0, and belong to no bucket."""


class SegmentTable:
    """The distinct rounds of this process, each written when it is first seen.

    Args:
        folder: folder of this rank; the file is created with the first round.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SEGMENTS_FILE
        self._file: TextIO | None = None
        self._numbers: dict[Segment, int] = {}
        self._lock = threading.Lock()

    def number_of(self, segment: Segment) -> int:
        """Return the number of a round's line; 0 if the table is full."""
        number = self._numbers.get(segment)
        if number is not None:
            return number
        with self._lock:
            if segment in self._numbers or len(self._numbers) >= _MAX_SEGMENTS:
                return self._numbers.get(segment, 0)
            number = self._numbers[segment] = len(self._numbers) + 1
            with suppress(OSError, ValueError):  # a full disk, or closed a moment ago
                if self._file is None:
                    self._file = self._path.open("x", encoding="utf-8")
                self._file.write(segment.to_json(number))
                self._file.flush()
        return number

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
