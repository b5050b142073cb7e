"""Predict the step time of every bucket size from one recording, and say which one to set.

The recorded steps are replayed with other buckets: when gradients are ready, what an all-reduce of each size costs,
and how much compute and communication slow each other down all come from the recording. The advice is best if the
recording was made with 'overlapscope record --probe-buckets', which tries some plans, or if a calibration.json from
'overlapscope calibrate' is in its folder. Many sizes give the same buckets, so sizes come in bands. Gains have 90 %
intervals.

Of a model that fully_shard has sharded (FSDP2, HSDP, replicate) it predicts other settings: how far to prefetch,
whether to reshard after forward, how large units are and the shape of the mesh, each with what it costs in memory.

--plan writes the best plan of all as a file for DistributedDataParallel(bucket_plan=...); torch's own DDP takes the
printed bucket_cap_mb_list.

With --json the output is one JSON object; docs/json.md says what its keys mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from overlapscope.cli.arguments import RECORDING, add_steps_argument, parse_folder_or_url
from overlapscope.cli.output_file import refuse_existing
from overlapscope.cli.reading import print_report, report_problems
from overlapscope.console import Progress

if TYPE_CHECKING:
    from overlapscope.analysis import Analysis
    from overlapscope.report.report import Report


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=parse_folder_or_url, help=RECORDING)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_steps_argument(parser)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="write the best bucket plan to a new file")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="file that 'overlapscope calibrate' wrote (default: calibration.json in the folder, if there is one)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the recommendation; return 1 if a part of the recording could not be read."""
    from overlapscope.advice.advice import advise
    from overlapscope.analysis import Analysis
    from overlapscope.bucket_model.plan_file import write_plan
    from overlapscope.report.buckets import build_buckets_report
    from overlapscope.trace.recording import read_trace

    if args.plan is not None:
        refuse_existing(args.plan, "to --plan")
    with Progress() as progress:
        trace = read_trace(args.traces, progress.count, steps=args.steps)
        progress.begin("predicting other settings")
        if args.plan is None:
            report = build_recommendation(Analysis(trace), args.calibration)
        else:
            advice = advise(Analysis(trace), args.calibration)
            write_plan(args.plan, advice.plan_file())
            report = build_buckets_report(trace, advice, args.plan)
    print_report(report, as_json=args.json)
    return report_problems(trace)


def build_recommendation(analysis: Analysis, calibration: Path | None = None) -> Report:
    """Build the report on bucket sizes, or of a sharded model that on its settings.

    Args:
        analysis: analysis of the recording.
        calibration: file that 'overlapscope calibrate' wrote; None for the one in the folder, if there is one.

    Raises:
        OverlapScopeError: nothing can be predicted.
    """
    from overlapscope.advice.advice import advise
    from overlapscope.advice.sharded import advise_on_sharding, is_sharded
    from overlapscope.report.buckets import build_buckets_report
    from overlapscope.report.sharded import build_sharded_report

    if is_sharded(analysis.trace):
        return build_sharded_report(analysis.trace, advise_on_sharding(analysis))
    return build_buckets_report(analysis.trace, advise(analysis, calibration))
