"""The command line: in this process, which has loaded what commands need, or in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO
from unittest import mock

from overlapscope.cli.main import main

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()"]

Ran = subprocess.CompletedProcess[str]


def overlapscope(*arguments: object, in_folder: Path = REPOSITORY, **environment: str) -> Ran:
    """Run a command in this process; its output and its children's is captured in files, as if in a pipe."""
    with (
        chdir(in_folder),
        mock.patch.dict(os.environ, environment),
        mock.patch("overlapscope.console.FIRST_LINE_AFTER_S", 3600.0),  # a busy machine is no reason for another output
        tempfile.TemporaryFile("w+", buffering=1) as output,
        tempfile.TemporaryFile("w+", buffering=1) as errors,
    ):
        with redirect_stdout(output), redirect_stderr(errors), _of_children(1, output), _of_children(2, errors):
            try:
                code = main([*map(str, arguments)])
            except SystemExit as exit_:  # argparse
                code = int(exit_.code or 0)
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


def overlapscope_process(*arguments: object, **environment: str) -> Ran:
    """Run a command in a process of its own; its output is captured in pipes.

    What it says of phases that last long is left out: how long they last depends on the machine.
    """
    ran = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        timeout=120,
    )
    ran.stderr = re.sub(r"^overlapscope: .* \.\.\.\n", "", ran.stderr, flags=re.MULTILINE)
    return ran


@contextmanager
def _of_children(descriptor: int, file: TextIO) -> Iterator[None]:
    """What child processes write to a descriptor of theirs goes to a file."""
    before = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)
