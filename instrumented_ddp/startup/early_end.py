"""What ended a process before it had joined a process group: ``early_end_*.json``, beside the folders of the ranks.

Such a process has recorded nothing, and may lack any package, even torch. So this file imports nothing but Python's own
modules, and is loaded alone, when a process is about to end. Whose line it was, and which rank, is found out by whoever
reads the file.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LAUNCHER: Final = "torch.distributed.launcher.api"
"""Module that only launchers import; they have the rank of a host in their environment, if any."""
_LAUNCHER_ERRORS: Final = ("torch.distributed.elastic.", "torch.multiprocessing.")
_MAX_TEXT: Final = 20_000
_MAX_FRAMES: Final = 64
_DEPTH_OF_EXIT: Final = 4
"""Number of frames from ``_describe_exit`` to the caller of ``sys.exit``."""


def write_early_end(folder: Path, error: BaseException | None, exit_status: object = None) -> None:
    """Write what ends this process, unless it is no rank and no process of ``multiprocessing``.

    Args:
        folder: folder of the run.
        error: exception that ends the process, or that was being handled when it exited.
        exit_status: argument of ``sys.exit``.
    """
    rank = next((int(value) for name in _RANK_VARIABLES if (value := os.environ.get(name, "")).isdecimal()), None)
    if _LAUNCHER in sys.modules or type(error).__module__.startswith(_LAUNCHER_ERRORS):
        return
    if rank is None and not _is_child_of_multiprocessing():
        return
    content = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": _read_boot_id(),
        "time_ns": time.monotonic_ns(),
        "rank": rank,
        "world_size": int(size) if (size := os.environ.get("WORLD_SIZE", "")).isdecimal() else None,
        **_describe_exit(exit_status),
        **_describe_error(error),
    }
    path = folder / f"early_end_{socket.gethostname()}_{os.getpid()}.json"
    path.write_text(json.dumps(content), encoding="utf-8")


def _describe_exit(status: object) -> dict[str, Any]:
    if status is None:
        return {"exit_status": None, "exit_text": "", "exit_frames": []}
    number, text = (status, "") if isinstance(status, int) else (1, str(status)[:_MAX_TEXT])
    frames = _list_callers(sys._getframe(_DEPTH_OF_EXIT))[:_MAX_FRAMES]
    return {"exit_status": number, "exit_text": text, "exit_frames": frames}


def _describe_error(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"type": "", "message": "", "traceback": "", "frames": []}
    return {
        "type": type(error).__qualname__,
        "message": _message_of(error)[:_MAX_TEXT],
        "traceback": "".join(traceback.format_exception(error))[-_MAX_TEXT:],
        "frames": _list_frames(error)[:_MAX_FRAMES],
    }


def _is_child_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _list_frames(error: BaseException) -> list[dict[str, Any]]:
    """Return the frames that an exception has passed through, innermost first."""
    frames: list[dict[str, Any]] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.append(_describe(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append({"file": error.filename, "line": error.lineno, "function": "<module>"})
    return frames[::-1]


def _list_callers(frame: FrameType | None) -> list[dict[str, Any]]:
    frames = []
    while frame is not None:
        frames.append(_describe(frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _describe(frame: FrameType, line: int) -> dict[str, Any]:
    code = frame.f_code
    return {"file": code.co_filename, "line": line, "function": getattr(code, "co_qualname", code.co_name)}


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # raised by a user's exception class
        return "(its message can't be had)"


def _read_boot_id() -> str | None:
    """Return the boot id as ``overlapscope.trace.clocks`` does, which this process may be unable to import."""
    try:
        from overlapscope.trace.clocks import get_boot_id

        return get_boot_id()
    except Exception:
        return None
