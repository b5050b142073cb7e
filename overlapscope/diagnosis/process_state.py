"""State of a rank's process: from /proc, from how it recorded its end, from its parent, and from stack dumps."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final, Literal

from overlapscope.diagnosis.evidence import CallSite, ExitCall, Failure, Liveness
from overlapscope.trace import clocks
from overlapscope.trace.process_files import ProcessExit
from overlapscope.trace.user_code import find_user_file, is_library_file

_ABORTED: Final = "Fatal Python error: Aborted"
_STATE: Final = 0
_FLAGS: Final = 6
_START_TICKS: Final = 19
_PENDING_SIGNALS: Final = 28
"""Indices of fields in ``/proc/PID/stat``, counted from the state (man 5 proc)."""
_EXITING: Final = 0x4
"""``PF_EXITING`` (include/linux/sched.h)."""
_KILLED: Final = 1 << (SIGKILL - 1)
_TICK_NS: Final = 10_000_000
"""Duration of a clock tick of /proc: 100 a second on all of Linux."""
_TOLERANCE_NS: Final = 1_000_000_000
_STATES: Final[dict[str, Liveness]] = {"R": "running", "T": "stopped", "t": "stopped"}


def is_on_this_host(where: dict[str, Any]) -> bool:
    """Return True if the rank with such a ``rank.json`` runs, or ran, on this host and since it was booted."""
    return where.get("host") == socket.gethostname() and where.get("boot_id") == clocks.get_boot_id() is not None


def read_liveness(where: dict[str, Any]) -> Liveness:
    """Return the state of the process of a ``rank.json``; only for a process on this host."""
    try:
        text = Path(f"/proc/{int(where['pid'])}/stat").read_text()
    except (OSError, KeyError, TypeError, ValueError):
        return "gone"
    fields = text.rpartition(")")[2].split()  # the name of the program may contain any character
    if has_process_ended(fields) or _is_of_a_later_process(int(fields[_START_TICKS]), where):
        return "gone"
    return _STATES.get(fields[_STATE], "sleeping")


def has_process_ended(fields: Sequence[str]) -> bool:
    """Return True if a process will never run again: only its exit code is left, or the kernel is taking it down.

    Args:
        fields: fields of its ``/proc/PID/stat``, from the state on.
    """
    is_exiting = bool(int(fields[_FLAGS]) & _EXITING or int(fields[_PENDING_SIGNALS]) & _KILLED)
    return is_exiting or fields[_STATE] in ("Z", "X", "x")


def read_process_start_ns() -> int | None:
    """Return when this process started, on the clock of its host, to a hundredth of a second; None if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return _on_clock_ns(int(fields[_START_TICKS]))
    except (OSError, IndexError, ValueError):
        return None


def _is_of_a_later_process(start_ticks: int, where: dict[str, Any]) -> bool:
    """Return True if the PID now belongs to another process, started after this one wrote ``rank.json``."""
    begun_ns = parse_written_ns(where)
    return begun_ns is not None and _on_clock_ns(start_ticks) > begun_ns + _TOLERANCE_NS


def _on_clock_ns(start_ticks: int) -> int:
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return start_ticks * _TICK_NS - asleep_ns


def parse_written_ns(where: dict[str, Any]) -> int | None:
    """Return when a ``rank.json`` or ``joining.json`` was written, on the clock of its host; None if unknown."""
    try:
        return int(where["time_ns"] if "time_ns" in where else where["clock_samples"][0]["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def combine_liveness_and_status(liveness: Liveness, exit_status: int | None) -> Liveness:
    """Combine the state of a process with its exit status: running to the end but exiting with an error is a failure.

    ``os._exit(0)`` leaves no record, but is a normal end.
    """
    if exit_status is None or liveness not in ("gone", "ended", "unknown"):
        return liveness
    if exit_status == 0:
        return "ended"
    if exit_status > 0:
        return liveness if liveness == "gone" else "failed"
    return "gone" if liveness == "unknown" else liveness


def find_exit(where: dict[str, Any], exits: Sequence[ProcessExit]) -> ProcessExit | None:
    """Find the exit of the process that wrote a ``rank.json``; its PID may have been used by earlier processes."""
    begun_ns = parse_written_ns(where)
    ends = [
        each
        for each in exits
        if not each.is_command
        and each.pid == where.get("pid")
        and each.boot_id == where.get("boot_id")
        and (begun_ns is None or each.time_ns >= begun_ns)
    ]
    return min(ends, key=lambda each: each.time_ns, default=None)


def find_job_signal_ns(where: dict[str, Any], exits: Sequence[ProcessExit]) -> int | None:
    """Return when the whole job was signaled to end, on the clock of the process that wrote a ``rank.json``."""
    times = [each.signaled_at_ns for each in exits if each.is_command and each.boot_id == where.get("boot_id")]
    return min([time_ns for time_ns in times if time_ns is not None], default=None)


def parse_exit_call(ended: dict[str, Any]) -> ExitCall | None:
    """Parse the call of ``sys.exit`` in an ``ended.json``."""
    status, caught = ended.get("exit_status"), ended.get("caught")
    if not isinstance(status, int):
        return None
    failure = parse_failure({"how": "exception", **caught}) if isinstance(caught, dict) else None
    return ExitCall(
        status=status,
        call_site=parse_call_site(ended),
        caught=failure,
        text=str(ended.get("exit_text") or ""),
        has_begun_next_iteration=parse_next_iteration_flag(ended),
    )


def parse_failure(ended: dict[str, Any]) -> Failure | None:
    """Parse the exception in an ``ended.json``."""
    if ended.get("how") != "exception":
        return None
    return Failure(
        type=str(ended.get("type", "an exception")),
        message=str(ended.get("message", "")),
        call_site=parse_call_site(ended),
        traceback=str(ended.get("traceback", "")),
        time_ns=time_ns if isinstance(time_ns := ended.get("time_ns"), int) else 0,
        has_begun_next_iteration=parse_next_iteration_flag(ended),
    )


def parse_next_iteration_flag(content: dict[str, Any]) -> bool | None:
    """Return True if the user's loop had begun its next iteration; None if unknown."""
    begun = content.get("has_begun_next_iteration")
    return begun if isinstance(begun, bool) else None


def parse_call_site(content: dict[str, Any]) -> CallSite | None:
    """Parse a line of the user's code from the fields of a JSON record."""
    file, line = content.get("file"), content.get("line")
    if not isinstance(file, str) or not isinstance(line, int):
        return None
    return CallSite(file=file, line=line, function=str(content.get("function") or ""))


WaitReason = Literal["data loader", "thread", "process", "socket", "file", "torch.distributed"]

_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_Frame = tuple[str, int, str]
"""File, line and function."""
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
    frames = _main_thread(stacks)
    found = find_user_file([file for file, _, _ in frames])
    if found is None:
        return None
    file, line, function = frames[found]
    return CallSite(file=file, line=line, function=function)


def find_wait_reason(stacks: str) -> WaitReason | None:
    """Return what the main thread waits for, as far as its frames show it: calls of C have none."""
    frames = _main_thread(stacks)
    files = [file for file, _, _ in frames]
    if any(_LOADERS.search(file) for file in files):
        return None if any(function == "__del__" for _, _, function in frames) else "data loader"
    for file in files:
        if not is_library_file(file):
            break
        for what, pattern in _CALLED:
            if pattern.search(file):
                return what
    return None


def was_aborted_by_native_thread(stacks: str) -> bool:
    """Return True if the thread that aborted a process ran no Python, as a backend's own threads.

    faulthandler marks the thread that it runs on, if that is one of Python's.
    """
    _, marker, threads = stacks.partition(_ABORTED)
    return bool(marker) and "Thread 0x" in threads and "Current thread 0x" not in threads


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


def find_callbacks(stacks: str) -> list[CallSite]:
    """Return the innermost line of each thread that runs Python and was not started by it: a backend's, in a callback.

    Those that Python has started begin in its module ``threading``.
    """
    *others, _ = _threads(stacks) or [[]]
    innermost = [thread[0] for thread in others if thread and not thread[-1][0].endswith("/threading.py")]
    return [CallSite(file=file, line=line, function=function) for file, line, function in innermost]


def _main_thread(stacks: str) -> list[_Frame]:
    """Return its frames, the innermost first; faulthandler writes this thread last."""
    return (_threads(stacks) or [[]])[-1]


def _threads(stacks: str) -> list[list[_Frame]]:
    """Return the frames of each thread, the innermost first."""
    threads: list[list[_Frame]] = []
    for text in stacks.splitlines():
        if _THREAD.match(text):
            threads.append([])
        elif threads and (frame := _FRAME.match(text)):
            threads[-1].append((frame["file"], int(frame["line"]), frame["function"]))
    return threads
