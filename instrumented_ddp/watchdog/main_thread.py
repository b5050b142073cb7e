"""What the main thread of this process is doing."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
from contextlib import suppress
from types import FrameType


def newest_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frames_of_main_thread() -> list[FrameType]:
    """All of them, the innermost first."""
    frame, frames = newest_frame(), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def stacks() -> str:
    """What Python is doing, on all threads, as faulthandler says it."""
    with suppress(OSError, RuntimeError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""
