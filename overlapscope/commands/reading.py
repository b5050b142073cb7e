"""How commands read a recording, and what they say of one that was only read in part."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from overlapscope.progress import Progress

if TYPE_CHECKING:
    from overlapscope.analysis.analysis import Analysis
    from overlapscope.trace.reader import Trace


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says who reads and divides a recording."""
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="have the workers of a Dask cluster read a large recording, which they see at the same path: "
        "tcp://HOST:8786 (default: as many processes as this machine has cores)",
    )


def analysis_of(args: argparse.Namespace, progress: Progress, *, with_cycles: bool) -> Analysis:
    """Read ``args.traces``, a large recording side by side and range by range of its steps, or just ``args.steps``.

    Args:
        with_cycles: whether more than the summary is wanted.
    """
    from overlapscope.analysis.analysis import Analysis
    from overlapscope.analysis.pieces import analyse
    from overlapscope.trace.reader import read_trace
    from overlapscope.trace.table_file import EVERYTHING
    from overlapscope.workers import dask, processes

    if args.steps != EVERYTHING:
        return Analysis(read_trace(args.traces, progress.count, steps=args.steps))

    with dask(args.dask) if args.dask else processes() as workers:
        return analyse(args.traces, workers, progress.count, progress.begin, with_cycles=with_cycles)


def chosen_steps(trace: Trace) -> str:
    """Which steps these are, to be put behind their number, if others were not read."""
    if trace.extent == "all":
        return ""
    return f" (only {trace.steps['step'].min()} to {trace.steps['step'].max()} were read)"


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
