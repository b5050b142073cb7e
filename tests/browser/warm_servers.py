"""Servers that start at once: forked from a process that has imported the web app, which takes seconds.

That process is asked for servers in lines of JSON, answers each with a process id, and ends with its input.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


class WarmServer:
    """``overlapscope serve`` in a process of its own, which writes to a log.

    Args:
        arguments: what follows ``serve`` on the command line.
        log: a file for all that it prints.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        log.write_text("")
        request = {"arguments": ["serve", *arguments], "environment": {**os.environ}, "log": str(log)}
        print(json.dumps(request), file=parent.stdin, flush=True)
        # It may be gone by now, and its number with it: then there is nothing to end.
        try:
            self._process: int | None = os.pidfd_open(int(parent.stdout.readline()))
        except ProcessLookupError:
            self._process = None

    def is_running(self) -> bool:
        return self._process is not None and not select.select([self._process], [], [], 0)[0]

    def end(self, limit_s: float) -> None:
        """SIGTERM.

        Raises:
            TimeoutError: it still runs after a while, and was killed.
        """
        if self._process is None:
            return
        try:
            if self.is_running():
                signal.pidfd_send_signal(self._process, signal.SIGTERM)
            if not select.select([self._process], [], [], limit_s)[0]:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
                raise TimeoutError(f"the server did not end in {limit_s} s")
        finally:
            os.close(self._process)
            self._process = None


@cache
def _parent() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.browser.warm_servers"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches pytest alone, which then closes its input
    )
    atexit.register(process.communicate)
    return process


def _fork_servers() -> None:
    """Answer requests until there are no more."""
    import dashboards.app  # noqa: F401
    import overlapscope.cli.main  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for their ends
    gc.collect()
    gc.freeze()  # what was imported is not garbage, and looking at it would copy its memory
    for line in sys.stdin:
        process = os.fork()
        if not process:
            _serve(**json.loads(line))
        print(process, flush=True)


def _serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    from overlapscope.cli.main import entry_point

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["overlapscope", *arguments]
    code: object = 1
    try:
        entry_point()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _fork_servers()
