"""Print where the step time of a recording goes and how much communication is hidden.

Shows the run, a one-sentence verdict, the straggler if there is one, the breakdown of a step (blocks that sum to the
mean step time, and what the job waited for), the means of each rank, and its first and last steps. Outlier steps are
excluded. Problems with the files go to stderr, one per line; the exit code is 1 if any part of the recording is missing
or unreadable.

With --json the output is one JSON object, which docs/json.md describes. Times are nanoseconds, named *_ns; a ratio or
an end of an interval that is unknown is null.
"""

from __future__ import annotations

import argparse

from overlapscope.cli.arguments import RECORDING, add_steps_argument, parse_folder_or_url
from overlapscope.cli.reading import add_workers_argument, print_report, read_analysis, report_problems
from overlapscope.console import Progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=parse_folder_or_url, help=RECORDING)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, with every step")
    add_steps_argument(parser)
    add_workers_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary; return 1 if a part of the recording could not be read."""
    from overlapscope.report.summary import build_summary_report

    with Progress() as progress:
        analysis = read_analysis(args, progress, with_cycles=False)
        progress.begin("looking for stragglers")
        report = build_summary_report(analysis)
    print_report(report, as_json=args.json)
    return report_problems(analysis.trace)
