"""Ranks that start at once: forked from a server that has imported torch.

Importing torch takes seconds, which a lab of a hundred jobs would mostly consist of.
"""

from __future__ import annotations

import inspect
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tests.cluster.ranks import CONTEXT


class WarmRank:
    """A process, as ``subprocess`` has it."""

    def __init__(self, script: Path, environment: dict[str, str]) -> None:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        given = {"script": str(script), "environment": environment, "output": theirs}
        self._process = CONTEXT.Process(target=exec, args=(_START, given))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout: IO[str] | None = os.fdopen(os.dup(ours.fileno()), errors="replace")
        ours.close()

    def poll(self) -> int | None:
        """Its exit code; None while it is there."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self) -> int:
        """Wait for its end."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(script: str, environment: dict[str, str], output: Connection) -> None:
    import atexit
    import gc
    import multiprocessing
    import os
    import runpy
    import sys

    multiprocessing.set_start_method("fork", force=True)  # as in any process: for the workers of data loaders
    gc.freeze()  # what was imported before the fork is not garbage, and looking at it would copy its memory
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    if environment.get("OVERLAPSCOPE_TRACE"):  # as the start-up module does, which a fork does not run
        from instrumented_ddp import attach

        attach()
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:  # of which the interpreter tells nobody
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()  # which a forked process leaves out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Run as text, so that none of its frames are of a file: the innermost line of a file, in the stacks of a rank, is to be
# one of the script.
_START = f"from __future__ import annotations\n{inspect.getsource(_run)}\n_run(script, environment, output)"
