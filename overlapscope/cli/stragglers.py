"""Print which ranks make the others wait, why, in which steps, and what it costs.

Every rank's local time in a step is compared with the median rank's: copies back, optimizer, data wait, forward,
backward, garbage collection, and communication that ended later for it. A delay in every step, every k steps, from one
step on, in an episode of steps or just once is named with the statistic that shows it. Its lateness is how much later
it arrives; its saving is what fixing it alone would gain, from a replay of the recording.

With --json the output is one JSON object; docs/json.md says what its keys mean.
"""

from __future__ import annotations

import argparse

from overlapscope.cli.arguments import RECORDING, add_steps_argument, parse_folder_or_url
from overlapscope.cli.reading import add_workers_argument, print_report, read_analysis, report_problems
from overlapscope.console import Progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=parse_folder_or_url, help=RECORDING)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_steps_argument(parser)
    add_workers_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if a part of the recording could not be read."""
    from overlapscope.report.stragglers import build_stragglers_report

    with Progress() as progress:
        analysis = read_analysis(args, progress, with_cycles=True)
        progress.begin("looking for stragglers")
        report = build_stragglers_report(analysis)
    print_report(report, as_json=args.json)
    return report_problems(analysis.trace)
