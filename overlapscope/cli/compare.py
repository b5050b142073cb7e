"""Compare two recordings, two ranges of steps or two bucket plans: is the new one slower, and where.

Examples:
    overlapscope compare before/ after/
    overlapscope compare before/ after/ --format html > comparison.html
    overlapscope compare before/ after/ --fail-above 3% --format md >> "$GITHUB_STEP_SUMMARY"
    overlapscope compare traces/ traces/ --base-steps 10:50 --new-steps 50:

Takes the difference of the breakdowns that 'overlapscope summary' shows, with 99 % intervals, so that its parts add up
to the difference of the step. Outlier steps are excluded. If no difference is seen, it says how
large one would have been. One recording can't show how much two runs of the same program differ: between recordings
intervals are wider by 1 % of a time, which is little for two machines. Record both on one, right after each other.

Exits 0 if no regression was found, 3 if one was, 1 if a recording can't be read or has too few
steps or parts of it are missing, and 2 if the arguments are wrong. With --json the output is one JSON object, which
docs/json.md describes.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from overlapscope import pages
from overlapscope.cli.arguments import parse_folder_or_url, steps
from overlapscope.cli.reading import print_report, report_problems
from overlapscope.console import Progress

if TYPE_CHECKING:
    from overlapscope.compare.comparison import Comparison

EXIT_CODE_REGRESSION: Final = 3
"""Exit code if one of the checked parts is slower."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "base", type=parse_folder_or_url, metavar="BASE", help="recording to compare with: a folder or URL"
    )
    parser.add_argument("new", type=parse_folder_or_url, metavar="NEW", help="new recording; may be the same as BASE")
    for side in ("base", "new"):
        parser.add_argument(
            f"--{side}-steps",
            type=steps,
            default=(None, None),
            metavar="START:STOP",
            help=f"step range of {side.upper()}, STOP exclusive (default: all steps)",
        )
        parser.add_argument(
            f"--{side}-plan",
            type=int,
            metavar="EPOCH",
            help=f"only steps of {side.upper()} with this bucket plan",
        )
    parser.add_argument(
        "--fail-above",
        type=_parse_percentage,
        default=0.0,
        metavar="PERCENT",
        help="smallest regression that fails, as a share of the step of BASE, such as 3%% (default: 0%%, any "
        "regression beyond noise)",
    )
    parser.add_argument(
        "--only",
        type=_parse_parts,
        default=("step",),
        metavar="PART,...",
        help="compare only these parts of the step: blocks such as exposed or data_wait, or exposed_transfer, compute, "
        "communication, hidden (default: step)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument(
        "--format",
        choices=("text", "md", "html"),
        default="text",
        help="output format; md is Markdown, html a page (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 3 if one of the checked parts is slower, else 1 if a recording is incomplete."""
    from overlapscope.report.compare import build_comparison_report
    from overlapscope.report.render_markdown import render_markdown

    with Progress() as progress:
        found = _compare(args, progress)
        report = build_comparison_report(found, args.only, args.fail_above)
    if args.format == "md":
        print(render_markdown(report, "OverlapScope: comparison"))
    elif args.format == "html":
        print(pages.render_comparison(found, args.only, args.fail_above))
    else:
        print_report(report, as_json=args.json)
    base, new = found.base.trace, found.new.trace
    code = max(report_problems(trace) for trace in ((base,) if base is new else (base, new)))
    is_slower = any(found.outcome(part, args.fail_above) == "slower" for part in args.only)
    return EXIT_CODE_REGRESSION if is_slower else code


def _compare(args: argparse.Namespace, progress: Progress) -> Comparison:
    """Read both sides, or one recording with the steps of both, and compare them."""
    from overlapscope.analysis import Analysis
    from overlapscope.compare.comparison import compare
    from overlapscope.compare.side import ComparisonSide, StepChoice
    from overlapscope.trace.recording import NEIGHBOR_STEPS, read_trace
    from overlapscope.trace.table_file import step_range_of_slice

    base_choice, new_choice = (
        StepChoice(first=steps[0], end=steps[1], plan=plan)
        for steps, plan in ((args.base_steps, args.base_plan), (args.new_steps, args.new_plan))
    )
    base_steps, new_steps = (step_range_of_slice(choice.first, choice.end) for choice in (base_choice, new_choice))
    is_same = args.base.resolve() == args.new.resolve()
    if is_same:
        base_steps = min(base_steps[0], new_steps[0]), max(base_steps[1], new_steps[1])
    base = Analysis(read_trace(args.base, progress.count, steps=base_steps, neighbors=NEIGHBOR_STEPS))
    progress.begin("reading logs of the new one")
    new = base
    if not is_same:
        new = Analysis(read_trace(args.new, progress.count, steps=new_steps, neighbors=NEIGHBOR_STEPS))
    progress.begin("dividing steps")
    return compare(ComparisonSide.of(base, base_choice), ComparisonSide.of(new, new_choice))


def _parse_percentage(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage: give one like 3%")
    return float(match[1]) / 100


def _parse_parts(text: str) -> tuple[str, ...]:
    from overlapscope.compare.side import PARTS

    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no part of a step: give some of {', '.join(PARTS)}")
    return parts
