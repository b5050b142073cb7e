"""Python programs that start at once: forked from a server that has imported torch.

Importing torch takes seconds, which a program that trains for a moment would mostly consist of.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tests.cluster.ranks import CONTEXT


class WarmProcess:
    """What ``python ARGUMENTS`` would run, in a process as ``subprocess`` has it. stdout and stderr are one.

    What it starts in this way, or as ``tests.cluster.ranks`` does, is forked from the same server.

    Args:
        arguments: a script, ``-m`` and a module, or ``-c`` and a text; and then what that is given.
        environment: all of it.
        output: a file for what it prints; None for a pipe, whose other end is ``stdout``.
        folder: the one that it works in; None for this process's.
        namespace: the network's, by name; None for this process's.
        leads_group: it has a process group of its own, to which belongs what it starts in turn.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        *,
        folder: Path | None = None,
        namespace: str | None = None,
        leads_group: bool = False,
    ) -> None:
        self.stdout: IO[str] | None = None
        if output is None:
            ours, theirs = CONTEXT.Pipe(duplex=False)
            self.stdout = os.fdopen(os.dup(ours.fileno()), errors="replace")
            ours.close()
        else:
            theirs = Connection(os.dup(output.fileno()), readable=False)  # which multiprocessing can hand over
        given = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "output": theirs,
            "folder": str(folder or Path.cwd()),
            "namespace": namespace,
            "group": 0 if leads_group else os.getpgrp(),
        }
        self._process = CONTEXT.Process(target=exec, args=(_START, given))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it is there."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutError: it did not come in time.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} is still there after {timeout_s} s")
        return self._process.exitcode


def _run(
    arguments: list[str],
    environment: dict[str, str],
    output: Connection,
    folder: str,
    namespace: str | None,
    group: int,
) -> None:
    import atexit
    import ctypes
    import gc
    import multiprocessing.forkserver
    import os
    import runpy
    import sys
    import types

    multiprocessing.set_start_method("fork", force=True)  # as in any process: for the workers of data loaders
    # Otherwise multiprocessing would start a second server for what this process starts, against what it says itself.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    gc.freeze()  # what was imported before the fork is not garbage, and looking at it would copy its memory
    os.setpgid(0, group)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns({namespace})")
    if environment.get("OVERLAPSCOPE_TRACE"):  # as the start-up module does, which a fork does not run
        from instrumented_ddp import attach

        attach()
    code = 0
    try:
        match arguments:
            case ["-m", module, *_]:
                sys.argv = arguments[1:]
                sys.path.insert(0, folder)
                sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
                runpy._run_module_as_main(module)  # what the interpreter calls
            case ["-c", text, *_]:
                sys.argv = ["-c", *arguments[2:]]
                sys.path.insert(0, folder)
                exec(text, {"__name__": "__main__"})
            case [script, *_]:
                sys.argv = arguments
                sys.path.insert(0, os.path.dirname(script))
                runpy.run_path(script, run_name="__main__")
    except SystemExit as error:  # of which the interpreter tells nobody
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()  # which a forked process leaves out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Run as text, so that none of its frames are of a file: the innermost line of a file, in the stacks of a rank, is to be
# one of the script.
_START = f"""from __future__ import annotations
{inspect.getsource(_run)}
_run(arguments, environment, output, folder, namespace, group)
"""
