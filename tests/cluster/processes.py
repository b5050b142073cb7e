"""Several commands at once, each a process of its own: a time limit, and all of them ended by pid if one fails."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).parents[2]
_LOOK_EVERY_S: Final = 0.05
_OUTPUT_SHOWN: Final = 4000


def run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str], time_limit_s: float) -> None:
    """Start all commands in the project's root and wait until all have ended well.

    Raises:
        RuntimeError: one has failed; says how its output ends.
        TimeoutError: they took longer than they may.
    """
    with ExitStack() as at_the_end:
        processes: list[subprocess.Popen[bytes]] = []
        outputs: list[IO[bytes]] = []
        for command in commands:
            output = at_the_end.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            at_the_end.callback(_end, process)
            outputs.append(output)
            processes.append(process)
        deadline = time.monotonic() + time_limit_s
        while any(process.poll() is None for process in processes):
            _check(processes, outputs)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over after {time_limit_s} s: {' '.join(commands[0])}")
            time.sleep(_LOOK_EVERY_S)
        _check(processes, outputs)


def _check(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[IO[bytes]]) -> None:
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if process.poll():
            output.seek(0)
            end = output.read()[-_OUTPUT_SHOWN:].decode(errors="replace")
            raise RuntimeError(f"process {number} ended with {process.returncode}:\n{end}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
