"""Call site of an event in user code: the nearest frame outside torch, training frameworks and other libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeVar

from instrumented_ddp.collectives.position import TrainingPosition
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.schema import CALL_SITES_FILE, NO_CALL_SITE
from overlapscope.trace.user_code import SKIPPED_PACKAGES, find_user_file, is_user_file

_MAX_FRAMES: Final = 64
_FRAMEWORK_FILES: Final = re.compile(
    r"(?<!/tests)/instrumented_ddp/|/torch/(_\w+(/|\.py)|(autograd|distributed|nn|optim|utils)/)"
)


class LoopTracker:
    """Tells whether the user's loop has begun its next iteration, by the current lines of its frames.

    A loop is a frame that lives on from one forward to the next. If it is before the line from which it called the
    latest forward, it is in its next iteration; after that line, it is still in the same. For example, if the forward
    was called on line 20 and an update followed, a frame on line 23 is in the same iteration, one on line 18 in the
    next.

    Args:
        position: knows whether there was an update since the latest forward.
    """

    def __init__(self, position: TrainingPosition) -> None:
        self._position = position
        self._has_seen_forward = False
        self._forward_lines: dict[int, tuple[CodeType, int]] = {}
        """Code and line of each frame by its identity, so that frames are not kept alive. The code is compared as well,
        since a later frame may have the same identity."""

    @property
    def step(self) -> int:
        """Return the number of updates so far."""
        return self._position.step

    def on_forward_start(self) -> None:
        """Store the lines of all frames that may be loops, at the start of a training forward."""
        self._has_seen_forward = True
        lines: dict[int, tuple[CodeType, int]] = {}
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if not is_framework_file(code.co_filename):
                lines[id(frame)] = code, frame.f_lineno
            frame = frame.f_back
        self._forward_lines = lines

    def describe(self) -> dict[str, Any]:
        """Return the step, as in ``RankPosition``, for ``ended.json``."""
        position = self._position
        return {
            "step": position.step + position.has_partly_updated,
            "is_after_update": position.has_updated or position.has_partly_updated,
        }

    def has_begun_next_iteration(
        self, frames: Iterable[tuple[FrameType, int]], *, may_be_forward: bool = False
    ) -> bool | None:
        """Return whether the loop is in the iteration after that of the latest update.

        Args:
            frames: frames with their lines, innermost first.
            may_be_forward: True if they may be about to do what counts as a forward: at its line they do it again.

        Returns:
            None if none of them was there in the latest forward, or there was no forward.
        """
        if self._has_seen_forward and not (self._position.has_updated or self._position.has_partly_updated):
            return True
        for frame, line in frames:
            code, line_of_forward = self._forward_lines.get(id(frame), (None, 0))
            if code is frame.f_code:
                return line < line_of_forward + may_be_forward
        return None


@lru_cache(maxsize=4096)
def is_framework_file(file: str) -> bool:
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


T = TypeVar("T")

_LOCALS_ARE_COPIES: Final = sys.version_info < (3, 13)
_UNSHARED_REFERENCES: Final = 3
"""Number of references to an unshared copy: the frame's, the caller's, and that of ``getrefcount``."""


def read_variables(frame: FrameType, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Return ``read(variables)`` for the variables of a frame; ``read`` must not keep its argument.

    Before Python 3.13, ``frame.f_locals`` of a function is a copy that the frame keeps until the next access: a tensor
    that the function has released since would live on, and with it device memory. So the copy is cleared, unless
    somebody else has it, such as a debugger. ``locals()`` returns the same copy, which an access would update: nothing
    is read in a function that calls it.
    """
    if _LOCALS_ARE_COPIES and _calls_locals(frame.f_code):
        return read({})
    variables = frame.f_locals
    try:
        return read(variables)
    finally:
        is_copy = _LOCALS_ARE_COPIES and frame.f_code.co_flags & CO_OPTIMIZED
        if is_copy and sys.getrefcount(variables) <= _UNSHARED_REFERENCES:
            variables.clear()


@lru_cache(maxsize=1024)
def _calls_locals(code: CodeType) -> bool:
    if not code.co_flags & CO_OPTIMIZED or {"locals", "vars"}.isdisjoint(code.co_names):
        return False
    # Attributes have these names too.
    return any(each.opname == "LOAD_GLOBAL" and each.argval in ("locals", "vars") for each in get_instructions(code))


_MAX_CALL_SITES: Final = 0xFFFF


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame runs code that is the user's in any stack, see ``is_user_file``.

    A frame is more precise than its file name: a framework may be installed in editable mode.
    """
    return is_user_file(_file_of(frame))


def _file_of(frame: FrameType) -> str:
    """Return the file of a frame; an empty text for code of a framework, and code generated for any library."""
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    is_generated = file.startswith("<") and module != "__main__" and not file.startswith("<ipython")
    return "" if is_generated or module.partition(".")[0] in SKIPPED_PACKAGES else file


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user among this one and its callers; None if there is none."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    found = find_user_file([_file_of(each) for each in frames])
    return None if found is None else frames[found]


def find_user_line(frames: Sequence[tuple[FrameType, int]]) -> tuple[FrameType, int] | None:
    """Return the innermost frame of the user, and its line, among those that an exception has passed through."""
    found = find_user_file([_file_of(frame) for frame, _ in frames])
    return None if found is None else frames[found]


def describe_frame(frame: FrameType) -> dict[str, Any]:
    """Return a frame's file, line and function, as used in files and messages."""
    return {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_qualname}


class CallSiteTable:
    """Numbers for call sites, each written to ``call_sites.jsonl`` when it is first seen."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / CALL_SITES_FILE).open("a", encoding="utf-8")
        self._numbers: dict[tuple[str, int], int] = {}  # by file and line: hashing a code object takes microseconds
        self._locations: list[tuple[str, int, str]] = []  # by number - 1
        self._is_user_file_cache: dict[str, bool] = {}

    def get_caller_number(self) -> int:
        """Return the number of the running line of user code, ``NO_CALL_SITE`` on a thread that runs none.

        On CUDA, autograd's hooks run on another thread, where no frame of user code is visible.
        """
        return self.number_of(self.find_caller_frame())

    def find_caller_frame(self) -> FrameType | None:
        """Return the innermost frame of the user; None on a thread that runs none."""
        frame: FrameType | None = sys._getframe(1)
        is_user_file = self._is_user_file_cache
        while frame is not None:
            is_user_frame = is_user_file.get(frame.f_code.co_filename)
            if is_user_frame or (is_user_frame is None and self.is_user_frame(frame)):
                return frame
            frame = frame.f_back
        return find_user_frame(sys._getframe(1))  # a program that is installed like a library

    def number_of(self, frame: FrameType | None) -> int:
        """Return the number of a frame's current line, ``NO_CALL_SITE`` if there is no frame."""
        if frame is None:
            return NO_CALL_SITE
        number = self._numbers.get((frame.f_code.co_filename, frame.f_lineno))
        return self._add(frame) if number is None else number

    def location(self, number: int) -> tuple[str, int, str] | None:
        """Return the file, line and function of a number; None if it is unknown."""
        return self._locations[number - 1] if 0 < number <= len(self._locations) else None

    def close(self) -> None:
        """Close the file; numbers stay known."""
        self._file.close()

    def is_user_frame(self, frame: FrameType) -> bool:
        """Return ``is_user_code`` of a frame, cached by file."""
        file = frame.f_code.co_filename
        known = self._is_user_file_cache.get(file)
        if known is None:
            known = self._is_user_file_cache[file] = is_user_code(frame)
        return known

    def _add(self, frame: FrameType) -> int:
        number = len(self._numbers) + 1
        if number > _MAX_CALL_SITES or self._file.closed:
            return NO_CALL_SITE
        self._numbers[frame.f_code.co_filename, frame.f_lineno] = number
        self._locations.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        with suppress(OSError):  # a full disk: the number is used without a line in the file
            self._file.write(dump_json_line({"call_site": number, **describe_frame(frame)}))
            self._file.flush()
        return number
