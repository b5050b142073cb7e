"""Several Python programs at once, each a process of its own: a time limit, and all of them ended if one fails."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from tests.cluster.warm_process import WarmProcess

ROOT: Final = Path(__file__).parents[2]
Method = Literal["spawn", "forkserver"]
"""How processes are started, as ``multiprocessing`` calls it: with a new interpreter, or from a warm server."""
METHOD: Final[Method] = "forkserver" if os.environ.get("BENCHMARKS_START") == "forkserver" else "spawn"
"""That of benchmarks. In a new process memory lies elsewhere, which is part of what they measure. Tests, for which
their figures mean nothing, ask for the other one."""
_LOOK_EVERY_S: Final = 0.05
_OUTPUT_SHOWN: Final = 4000


@dataclass(frozen=True)
class Program:
    """What Python is to run."""

    arguments: Sequence[str]
    """Of the interpreter, such as ``-m`` and a module."""
    environment: Mapping[str, str]
    host: str | None = None
    """The name of a network namespace; None for this process's."""


def run_together(programs: Sequence[Program], time_limit_s: float, method: Method = METHOD) -> list[str]:
    """Start all programs in the project's root and wait until all have ended well. Returns what each has printed.

    Raises:
        RuntimeError: one has failed; says how its output ends.
        TimeoutError: they took longer than they may.
    """
    with ExitStack() as at_the_end:
        processes: list[subprocess.Popen[bytes] | WarmProcess] = []
        outputs: list[IO[bytes]] = []
        for program in programs:
            output = at_the_end.enter_context(tempfile.TemporaryFile())
            process = _start(program, output, method)
            at_the_end.callback(_end, process)
            outputs.append(output)
            processes.append(process)
        deadline = time.monotonic() + time_limit_s
        while any(process.poll() is None for process in processes):
            _check(processes, outputs)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over after {time_limit_s} s: {' '.join(programs[0].arguments)}")
            time.sleep(_LOOK_EVERY_S)
        _check(processes, outputs)
        return [_read(output) for output in outputs]


def _start(program: Program, output: IO[bytes], method: Method) -> subprocess.Popen[bytes] | WarmProcess:
    if method == "forkserver":
        return WarmProcess(program.arguments, program.environment, output, folder=ROOT, namespace=program.host)
    prefix = [] if program.host is None else ["ip", "netns", "exec", program.host]
    command = [*prefix, sys.executable, *program.arguments]
    return subprocess.Popen(command, env=program.environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def _check(processes: Sequence[subprocess.Popen[bytes] | WarmProcess], outputs: Sequence[IO[bytes]]) -> None:
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if code := process.poll():
            raise RuntimeError(f"process {number} ended with {code}:\n{_read(output)[-_OUTPUT_SHOWN:]}")


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes] | WarmProcess) -> None:
    process.kill()
    process.wait()
