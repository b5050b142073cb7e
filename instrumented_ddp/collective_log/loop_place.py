"""Whether the user's loop has begun its next iteration, which no hook tells: by the lines at which its frames are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Final

from instrumented_ddp.collective_log.position import Position

_MOST_FRAMES: Final = 64
_OF_CALLS: Final = re.compile(
    r"(?<!/tests)/instrumented_ddp/|/torch/(_\w+(/|\.py)|(autograd|distributed|nn|optim|utils)/)"
)


class LoopPlace:
    """Compares where frames are with where they were in the newest training forward.

    A loop is a frame that lives on from one forward to the next. Before the line from which it called the newest
    forward it is in its next iteration, after that line still in the same.

    Args:
        position: knows whether there was an update since the newest forward.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self._lines: dict[int, tuple[CodeType, int]] = {}
        """By identity of a frame, which may be that of a later one: so with its code. Frames are not kept alive."""

    def forward_begins(self) -> None:
        """A forward begins whose gradients are wanted."""
        self._lines = {id(frame): (frame.f_code, line) for frame, line in frames_of(sys._getframe(1))}

    def has_begun_next(self, frames: Iterable[tuple[FrameType, int]]) -> bool | None:
        """Whether the loop is in the iteration after that of the newest update.

        Args:
            frames: with their lines, the innermost first.

        Returns:
            None if none of them was there in the newest forward, or there was no forward.
        """
        if self._lines and not self._position.has_updated:
            return True
        for frame, line in frames:
            code, line_of_forward = self._lines.get(id(frame), (None, 0))
            if code is frame.f_code and not _runs_no_loop(code.co_filename):
                return line < line_of_forward
        return None


@lru_cache(maxsize=4096)
def _runs_no_loop(file: str) -> bool:
    """Whether frames of a file live for one call only, so that one which seems to be another's is a later one."""
    return _OF_CALLS.search(file) is not None


def frames_of(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """A frame and those that have called it, with the lines at which they are."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame, frame.f_lineno
        frame = frame.f_back


def frames_of_traceback(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames that an exception has gone through, the innermost first, with the lines at which it did."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]
