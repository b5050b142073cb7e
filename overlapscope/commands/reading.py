"""Reading a recording for a command, with a progress bar on a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlapscope.trace.reader import Trace


def read_with_progress(path: Path) -> Trace:
    """Read a recording.

    Raises:
        OverlapScopeError: the folder has nothing to show.
    """
    from rich.console import Console
    from rich.progress import Progress

    from overlapscope.trace.reader import read_trace

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading logs", total=None)
        return read_trace(path, lambda done, ranks: progress.update(task, completed=done, total=ranks))


def report_problems(trace: Trace) -> int:
    """Say on stderr what is wrong with the files, and of which attempt they are if the job was started again.

    Returns:
        The exit code: 1 if any part of the recording is missing or unreadable.
    """
    from overlapscope.diagnosis.attempts import others_text, read_attempts

    if others := others_text(read_attempts(trace.path), trace.path):
        print(f"note: {others}", file=sys.stderr)
    for problem in trace.problems:
        print(f"{problem.severity}: {problem}", file=sys.stderr)
    return 1 if trace.errors else 0
