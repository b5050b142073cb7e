"""Low-priority child process that keeps a metrics file up to date while a training run is recorded.

Example::

    python -m overlapscope.cli.metrics_process TRACES FILE
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from overlapscope.cli.child_process import environment_without_recording
from overlapscope.errors import OverlapScopeError

UPDATE_INTERVAL_S: Final = 15.0
"""Seconds between two updates; scraping much more often is unusual."""
RETRY_INTERVAL_S: Final = 1.0
"""Seconds between two tries as long as there is nothing to write."""
_MAX_CORE_SHARE: Final = 0.05
_NICENESS: Final = 10
_LAST_UPDATE_TIMEOUT_S: Final = 60.0
_DONE_MESSAGE: Final = b"."
_OWN_FILE_PREFIXES: Final = ("# TYPE overlapscope_", "# EOF")
"""Beginnings of files that ``open_metrics.text_of`` has written."""


def refuse_foreign(path: Path) -> None:
    """Refuse to replace a file that is no metrics file of ours.

    Raises:
        OverlapScopeError: the path is not a metrics file of ours, or nothing can be written there.
    """
    try:
        is_ours = path.is_file() and path.read_text(errors="replace").startswith(_OWN_FILE_PREFIXES)
        if path.exists() and not is_ours:
            raise OverlapScopeError(f"{path}: is there and holds no metrics of OverlapScope; give another name")
        if not os.access(path.absolute().parent, os.W_OK):
            raise OverlapScopeError(f"{path}: its folder is missing, or can't be written")
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be replaced ({error.strerror})") from None


def remove_stale(path: Path) -> None:
    """Remove the metrics file of an earlier run, so that nobody mistakes its metrics for those of this run.

    Raises:
        OverlapScopeError: the path is not a metrics file of ours, or nothing can be written there.
    """
    refuse_foreign(path)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be replaced ({error.strerror})") from None


@contextmanager
def metrics_writer(traces: Path, path: Path) -> Iterator[None]:
    """Run a child process that keeps a metrics file up to date, and writes it a last time at the end.

    Args:
        traces: folder of the recording.
        path: the metrics file, for which ``remove_stale`` has been called.
    """
    command = [sys.executable, "-m", __name__, str(traces), str(path)]
    process = subprocess.Popen(command, env=environment_without_recording(), stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        yield
        with suppress(OSError, subprocess.TimeoutExpired):
            process.stdin.write(_DONE_MESSAGE)
            process.stdin.close()
            process.wait(_LAST_UPDATE_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def update_until_done(traces: Path, path: Path, control_fd: int) -> None:
    """Write the metrics file periodically until the parent process says that the recording is over.

    If the parent has died, remove the file, as readers could not see that it is outdated.

    Args:
        control_fd: read end of a pipe from the parent.
    """
    last_problem, message = "", None
    while message is None:
        begun_s = time.process_time()
        last_problem = _write(traces, path, last_problem, is_live=True)
        pause_s = UPDATE_INTERVAL_S if path.exists() else RETRY_INTERVAL_S
        message = _read_message(control_fd, max(pause_s, (time.process_time() - begun_s) / _MAX_CORE_SHARE))
    if message == _DONE_MESSAGE:
        _write(traces, path, last_problem, is_live=False)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _read_message(control_fd: int, wait_s: float) -> bytes | None:
    """Read the parent's message: ``_DONE_MESSAGE``, empty if it has died, None if there is none within ``wait_s``."""
    ready, _, _ = select.select([control_fd], [], [], wait_s)
    return os.read(control_fd, len(_DONE_MESSAGE)) if ready else None


def _write(traces: Path, path: Path, last_problem: str, *, is_live: bool) -> str:
    """Write the file, print a problem unless it is the one printed last, and return the last problem printed."""
    problem = _try_write(traces, path, is_live=is_live)
    if problem and problem != last_problem:
        print(f"overlapscope record: {problem}", file=sys.stderr, flush=True)
    return problem or last_problem


def _try_write(traces: Path, path: Path, *, is_live: bool) -> str:
    from overlapscope.interop.open_metrics import compute_metrics_text, replace_file

    try:
        text = compute_metrics_text(traces, is_live=is_live)
    except OverlapScopeError:
        return ""  # nothing is recorded yet, or the next file is being written
    except Exception as error:  # an unforeseen recording must not stop the updates
        return f"{path}: figures can't be made ({error!r})"
    try:
        replace_file(path, text)
    except OverlapScopeError as error:
        return str(error)
    return ""


def main() -> None:
    """Keep the metrics file named on the command line up to date."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the training, after which we end too
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    traces, path = map(Path, sys.argv[1:])
    update_until_done(traces, path, sys.stdin.fileno())


if __name__ == "__main__":
    main()
