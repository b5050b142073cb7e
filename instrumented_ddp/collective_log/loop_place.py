"""Detection of whether the user's loop has begun its next iteration, by the current lines of its frames."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Final

from instrumented_ddp.collective_log.position import TrainingPosition

_MAX_FRAMES: Final = 64
_FRAMEWORK_FILES: Final = re.compile(
    r"(?<!/tests)/instrumented_ddp/|/torch/(_\w+(/|\.py)|(autograd|distributed|nn|optim|utils)/)"
)


class LoopTracker:
    """Compares the lines of frames with their lines in the latest training forward.

    A loop is a frame that lives on from one forward to the next. If it is before the line from which it called the
    latest forward, it is in its next iteration; after that line, it is still in the same. For example, if the forward
    was called on line 20 and an update followed, a frame on line 23 is in the same iteration, one on line 18 in the
    next.

    Args:
        position: knows whether there was an update since the latest forward.
    """

    def __init__(self, position: TrainingPosition) -> None:
        self._position = position
        self._forward_lines: dict[int, tuple[CodeType, int]] = {}
        """Code and line of each frame by its identity, so that frames are not kept alive. The code is compared as well,
        since a later frame may have the same identity."""

    def on_forward_start(self) -> None:
        """Store the lines of all frames at the start of a training forward."""
        self._forward_lines = {id(frame): (frame.f_code, line) for frame, line in iter_frames(sys._getframe(1))}

    def has_begun_next_iteration(self, frames: Iterable[tuple[FrameType, int]]) -> bool | None:
        """Return whether the loop is in the iteration after that of the latest update.

        Args:
            frames: frames with their lines, innermost first.

        Returns:
            None if none of them was there in the latest forward, or there was no forward.
        """
        if self._forward_lines and not self._position.has_updated:
            return True
        for frame, line in frames:
            code, line_of_forward = self._forward_lines.get(id(frame), (None, 0))
            if code is frame.f_code and not _is_framework_file(code.co_filename):
                return line < line_of_forward
        return None


@lru_cache(maxsize=4096)
def _is_framework_file(file: str) -> bool:
    """Return whether frames of a file live for one call only, so that an equal identity must be a later frame's."""
    return _FRAMEWORK_FILES.search(file) is not None


def iter_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield a frame and its callers, with their current lines."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame, frame.f_lineno
        frame = frame.f_back


def list_traceback_frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the frames that an exception has passed through, innermost first, with the lines where it did."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]
