"""Call site of an event in user code: the nearest frame outside torch and training frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from overlapscope.trace.checksum import dump_json_line
from overlapscope.trace.format import CALL_SITES_FILE, NO_CALL_SITE
from overlapscope.trace.user_code import SKIPPED_PACKAGES, is_user_file

_INTERACTIVE_FILES: Final = ("<string>", "<stdin>")
_MAX_CALL_SITES: Final = 0xFFFF


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame runs code other than Python's, torch's, a training framework's, or this package's.

    A frame is more precise than its file name: a framework may be installed in editable mode, and code typed in
    interactively is user code if its module is, while by its file name it looks like generated code.
    """
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    file = frame.f_code.co_filename
    return package not in SKIPPED_PACKAGES and (is_user_file(file) or file in _INTERACTIVE_FILES)


def find_user_frame(
    frame: FrameType | None, is_user_frame: Callable[[FrameType], bool] = is_user_code
) -> FrameType | None:
    """Return the first frame of user code among this one and its callers; None if there is none."""
    while frame is not None and not is_user_frame(frame):
        frame = frame.f_back
    return frame


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
        """Return the nearest frame of user code; None on a thread that runs none."""
        return find_user_frame(sys._getframe(1), self.is_user_frame)

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
