"""Where a process was, from faulthandler's dumps of its Python stacks."""

from __future__ import annotations

import re
from typing import Final

from overlapscope.diagnosis.evidence import CallSite
from overlapscope.trace.user_code import is_users_file

_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD: Final = re.compile(r"^(Current thread|Thread) 0x")


def user_line(stacks: str) -> CallSite | None:
    """The user's innermost line in the main thread, which faulthandler writes last; None if there is none."""
    found, is_in_thread = None, False
    for text in stacks.splitlines():
        if _THREAD.match(text):
            found, is_in_thread = None, True
        elif is_in_thread and found is None and (frame := _FRAME.match(text)) and is_users_file(frame["file"]):
            found = CallSite(file=frame["file"], line=int(frame["line"]), function=frame["function"])
    return found
