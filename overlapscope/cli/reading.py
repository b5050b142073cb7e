"""Reading of a recording by commands: options, parallel analysis, and reports of its problems."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from overlapscope.console import Progress

if TYPE_CHECKING:
    from overlapscope.analysis import Analysis
    from overlapscope.report.report import Report
    from overlapscope.trace.recording import Trace


def add_workers_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--dask``, which selects the workers that read and analyze a recording."""
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="Dask scheduler such as tcp://HOST:8786, whose workers must see the same path (default: one process per "
        "core of this machine)",
    )


def read_analysis(args: argparse.Namespace, progress: Progress, *, with_cycles: bool) -> Analysis:
    """Read and analyze ``args.traces``: all of it, in parallel and in chunks of steps if large, or only ``args.steps``.

    Args:
        with_cycles: also compute what the straggler analysis needs, beyond the summary.
    """
    from overlapscope.analysis import Analysis
    from overlapscope.chunked_analysis import analyze_recording
    from overlapscope.trace.recording import read_trace
    from overlapscope.trace.table_file import ALL_STEPS
    from overlapscope.workers import dask, processes

    if args.steps != ALL_STEPS:
        return Analysis(read_trace(args.traces, progress.count, steps=args.steps))

    with dask(args.dask) if args.dask else processes() as workers:
        return analyze_recording(args.traces, workers, progress.count, progress.begin, with_cycles=with_cycles)


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report to stdout: as text, or as one JSON object."""
    if as_json:
        from overlapscope.report.render_json import render_json

        print(render_json(report))
    else:
        from overlapscope.report.render_text import print_report as print_text

        print_text(report)


def report_problems(trace: Trace) -> int:
    """Print problems with the files to stderr, and if the job was restarted, which attempt was read.

    Returns:
        The exit code: 1 if any part of the recording is missing or unreadable.
    """
    from overlapscope.diagnosis.attempts import format_other_attempts, read_attempts
    from overlapscope.report.problems import merge_problems

    if others := format_other_attempts(read_attempts(trace.path), trace.path):
        print(f"note: {others}", file=sys.stderr)
    for problem in merge_problems(trace.problems):
        print(f"{problem.severity}: {problem}", file=sys.stderr)
    return 1 if trace.errors else 0
