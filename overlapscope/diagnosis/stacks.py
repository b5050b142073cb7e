"""Parser of faulthandler's stack dumps: the user's line, and what the process waits for."""

from __future__ import annotations

import re
from typing import Final, Literal

from overlapscope.diagnosis.evidence import CallSite
from overlapscope.trace.user_code import is_user_file

WaitReason = Literal["data loader", "thread", "process", "socket", "file", "torch.distributed"]

_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD: Final = re.compile(r"^(Current thread|Thread) 0x")

_LOADERS: Final = re.compile(
    r"/torch/utils/data/|/site-packages/(webdataset|datasets|streaming|litdata|ffcv|nvidia/dali)/"
)
_CALLED: Final[tuple[tuple[WaitReason, re.Pattern[str]], ...]] = (
    ("torch.distributed", re.compile(r"/torch/distributed/")),
    ("process", re.compile(r"/(subprocess|multiprocessing/[a-z_]+)\.py$")),
    ("socket", re.compile(r"/(socket|ssl|selectors)\.py$|/(http|urllib|urllib3|requests)/")),
    ("file", re.compile(r"/torch/serialization\.py$|/(shutil|tarfile|zipfile|gzip|pickle)\.py$|/safetensors/")),
    ("thread", re.compile(r"/(threading|queue)\.py$|/concurrent/futures/")),
)
"""What the user's line calls, by the file of the callee."""


def find_user_line(stacks: str) -> CallSite | None:
    """Return the user's innermost line in the main thread; None if there is none."""
    frames = (CallSite(file=file, line=line, function=function) for file, line, function in _main_thread(stacks))
    return next((frame for frame in frames if is_user_file(frame.file)), None)


def find_wait_reason(stacks: str) -> WaitReason | None:
    """Return what the main thread waits for, as far as its frames show it: calls of C have none."""
    files = [file for file, _, _ in _main_thread(stacks)]
    if any(_LOADERS.search(file) for file in files):
        return "data loader"
    for file in files:
        if is_user_file(file):
            break
        for what, pattern in _CALLED:
            if pattern.search(file):
                return what
    return None


def has_begun_next_iteration(stacks: str, of_backward: CallSite | None) -> bool | None:
    """Return True if the main thread is at an earlier line of the function that called the latest backward.

    Returns:
        None if it is not in that function, or if the function is unknown.
    """
    if of_backward is None:
        return None
    name = of_backward.function.rpartition(".")[2]
    lines = (line for file, line, function in _main_thread(stacks) if (file, function) == (of_backward.file, name))
    line = next(lines, None)
    return None if line is None else line < of_backward.line


def _main_thread(stacks: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of its frames, the innermost first; faulthandler writes this thread last."""
    frames: list[tuple[str, int, str]] = []
    for text in stacks.splitlines():
        if _THREAD.match(text):
            frames = []
        elif frame := _FRAME.match(text):
            frames.append((frame["file"], int(frame["line"]), frame["function"]))
    return frames
