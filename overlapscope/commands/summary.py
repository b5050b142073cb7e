"""Print where the step time of a recording goes and how much communication is hidden.

Shows the run, medians per rank, the first and last steps of each rank, and a one-sentence verdict. Problems with the
files go to stderr, one per line; the exit code is 1 if any part of the recording is missing or unreadable.

With --json the output is one JSON object with the keys
  path      the recording
  run       what run.json says
  verdict   the sentence and the medians behind it
  ranks     one object per rank: medians over its steps after the warm-up
  steps     one object per rank and finished step
  problems  objects with severity ("note" or "error") and message
Times are whole nanoseconds, named *_ns; a ratio or share that has nothing to divide by is null.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapscope.commands.reading import read_with_progress, report_problems


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=Path, help="the folder that 'overlapscope record -o' wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, with every step")


def run(args: argparse.Namespace) -> int:
    """Print the summary; 1 if a part of the recording could not be read."""
    from overlapscope.analysis.overlap import overlap_by_step
    from overlapscope.commands import summary_report

    trace = read_with_progress(args.traces)
    per_step = overlap_by_step(trace)
    if args.json:
        print(summary_report.as_json(trace, per_step))
    else:
        summary_report.print_text(trace, per_step)
    return report_problems(trace)
