"""The process that keeps a file of metrics up to date while a training is recorded, at low priority.

Example::

    python -m overlapscope.commands.metrics_process TRACES FILE
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

from overlapscope.commands.child_process import plain_environment
from overlapscope.errors import OverlapScopeError

EVERY_S: Final = 15.0
"""Nobody scrapes much more often."""
FIRST_S: Final = 1.0
"""Until there is something to write."""
_MOST_OF_A_CORE: Final = 0.05
_NICENESS: Final = 10
_LAST_S: Final = 60.0
_OVER: Final = b"."
_OURS: Final = ("# TYPE overlapscope_", "# EOF")
"""How a file begins that ``open_metrics.text_of`` has written."""


def make_way(path: Path) -> None:
    """Remove the file of an earlier run, so that nobody takes its figures for those of this one.

    Raises:
        OverlapScopeError: what is there is not a file of ours, or nothing can be written there.
    """
    try:
        if path.exists():
            if not path.is_file() or not path.read_text(errors="replace").startswith(_OURS):
                raise OverlapScopeError(f"{path}: is there and holds no metrics of OverlapScope; give another name")
            path.unlink()
        if not os.access(path.absolute().parent, os.W_OK):
            raise OverlapScopeError(f"{path}: its folder is missing, or can't be written")
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be replaced ({error.strerror})") from None


@contextmanager
def metrics_kept(traces: Path, path: Path) -> Iterator[None]:
    """Have a file of metrics kept up to date, and written once more at the end.

    Args:
        traces: the folder that is recorded into.
        path: the file, for which ``make_way`` has been called.
    """
    command = [sys.executable, "-m", __name__, str(traces), str(path)]
    process = subprocess.Popen(command, env=plain_environment(), stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        yield
        with suppress(OSError, subprocess.TimeoutExpired):
            process.stdin.write(_OVER)
            process.stdin.close()
            process.wait(_LAST_S)
    finally:
        process.kill()
        process.wait()


def keep_up_to_date(traces: Path, path: Path, told: int) -> None:
    """Write the file again and again until told that it is over.

    If the process that wanted it is gone, so is the file: nobody would know how old its figures are.

    Args:
        told: the end of a pipe whose other end that process has.
    """
    said, word = "", None
    while word is None:
        begun_s = time.process_time()
        said = _write(traces, path, said, is_live=True)
        pause_s = EVERY_S if path.exists() else FIRST_S
        word = _word(told, max(pause_s, (time.process_time() - begun_s) / _MOST_OF_A_CORE))
    if word == _OVER:
        _write(traces, path, said, is_live=False)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _word(told: int, wait_s: float) -> bytes | None:
    """What has been said meanwhile: ``_OVER``, or nothing any more; None if nobody has said anything."""
    ready, _, _ = select.select([told], [], [], wait_s)
    return os.read(told, len(_OVER)) if ready else None


def _write(traces: Path, path: Path, said: str, *, is_live: bool) -> str:
    """Write the file, and say what goes wrong unless that was what has been ``said`` before."""
    problem = _problem_of_writing(traces, path, is_live=is_live)
    if problem and problem != said:
        print(f"overlapscope record: {problem}", file=sys.stderr, flush=True)
    return problem or said


def _problem_of_writing(traces: Path, path: Path, *, is_live: bool) -> str:
    from overlapscope.exports.metrics_file import metrics_text, replace_file

    try:
        text = metrics_text(traces, is_live=is_live)
    except OverlapScopeError:
        return ""  # nothing is recorded yet, or the next file is being written
    except Exception as error:  # a recording that nobody has thought of must not end the file
        return f"{path}: figures can't be made ({error!r})"
    try:
        replace_file(path, text)
    except OverlapScopeError as error:
        return str(error)
    return ""


def main() -> None:
    """Keep the file that the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the training, and end this one with it
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    traces, path = map(Path, sys.argv[1:])
    keep_up_to_date(traces, path, sys.stdin.fileno())


if __name__ == "__main__":
    main()
