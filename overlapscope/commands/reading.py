"""What commands say of a recording that was only read in part."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlapscope.trace.reader import Trace


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
