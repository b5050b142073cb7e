"""The variables of a frame of the user's, read so that nothing is kept alive by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dis import get_instructions
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

_FRAMES_KEEP_COPIES: Final = sys.version_info < (3, 13)
_REFERENCES: Final = 3
"""To a copy that nobody else has: the frame's, that of who has just asked for it, and that of who counts."""


def read_variables(frame: FrameType, read: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``read`` makes of the variables of a frame; it must not keep what it is given.

    Before Python 3.13 ``frame.f_locals`` of a function is a copy that the frame keeps until somebody asks again: a
    tensor that the function has let go of since would live on, and with it memory of the device. So it is emptied,
    unless somebody else has it, such as a debugger. ``locals()`` hands out the same copy, which asking would bring up
    to date: in a function that calls it there is nothing to read.
    """
    if _FRAMES_KEEP_COPIES and _asks_for_its_own(frame.f_code):
        return read({})
    variables = frame.f_locals
    try:
        return read(variables)
    finally:
        is_copy = _FRAMES_KEEP_COPIES and frame.f_code.co_flags & CO_OPTIMIZED
        if is_copy and sys.getrefcount(variables) <= _REFERENCES:
            variables.clear()


@lru_cache(maxsize=1024)
def _asks_for_its_own(code: CodeType) -> bool:
    if not code.co_flags & CO_OPTIMIZED or {"locals", "vars"}.isdisjoint(code.co_names):
        return False
    # Names are also those of attributes.
    return any(each.opname == "LOAD_GLOBAL" and each.argval in ("locals", "vars") for each in get_instructions(code))
