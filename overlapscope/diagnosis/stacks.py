"""What faulthandler's dumps of Python stacks say of where a process stood."""

from __future__ import annotations

import re
from typing import Final

from overlapscope.diagnosis.evidence import CallSite

_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD: Final = re.compile(r"^(Current thread|Thread) 0x")
_NOT_THE_USERS: Final = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/instrumented_ddp/(?!examples)|^<")


def user_line(stacks: str) -> CallSite | None:
    """The innermost line of the user's in the main thread, which faulthandler writes last; None if there is none."""
    threads: list[list[CallSite]] = []
    for text in stacks.splitlines():
        if _THREAD.match(text):
            threads.append([])
        elif threads and (frame := _FRAME.match(text)):
            site = CallSite(file=frame["file"], line=int(frame["line"]), function=frame["function"])
            threads[-1].append(site)
    for frames in reversed(threads):
        users = [site for site in frames if not _NOT_THE_USERS.search(site.file)]
        if users:
            return users[0]
    return None
