"""The real command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from overlapscope.cli import entry_point; entry_point()"]


def overlapscope(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; its output is captured, so that it runs as in a pipe."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        timeout=120,
    )
