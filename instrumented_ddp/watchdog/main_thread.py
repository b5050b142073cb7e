"""Stack frames of the main thread, and stack traces of all threads."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
from contextlib import suppress
from types import FrameType


def innermost_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frames_of_main_thread() -> list[FrameType]:
    """Return all frames of the main thread, innermost first."""
    frame, frames = innermost_frame(), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def stacks() -> str:
    """Return the stack traces of all threads, as faulthandler formats them."""
    with suppress(OSError, RuntimeError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""
