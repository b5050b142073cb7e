"""Reading of local variables of user code without keeping them alive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dis import get_instructions
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

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
