"""Write what the pages of 'overlapscope serve' say of a recording to one file, to be kept, sent or printed.

Example:
    overlapscope report traces/ -o report.html

The HTML has everything in it: it opens from disk, without a server and without a network. It has the breakdown of a
step, what is worth doing, the typical step as a timeline to zoom, stragglers, bucket sizes and the order of
collectives; if something is wrong with the job, that comes first.

With --format md, or -o FILE.md, it is a short text in Markdown, to paste into an issue. It goes to stdout unless -o
names a file.

An existing file is not overwritten. Problems with the recording go to stderr, one per line; the exit code is 1 if any
part of it is missing or unreadable.
"""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from overlapscope import pages
from overlapscope.cli.arguments import add_steps_argument, parse_folder
from overlapscope.cli.output_file import create_file, refuse_existing
from overlapscope.cli.reading import report_problems
from overlapscope.console import Progress

_DEFAULT_OUTPUT: Final = Path("report.html")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "traces", type=parse_folder, help="folder that 'overlapscope record -o' wrote, or Flight Recorder dumps"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="new file (default: report.html; for Markdown, stdout)"
    )
    add_steps_argument(parser)
    parser.add_argument(
        "--format",
        choices=("html", "md"),
        help="output format, HTML or Markdown (default: html, or md if FILE ends with .md)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; return 1 if a part of the recording could not be read."""
    is_named_md = args.output is not None and args.output.suffix == ".md"
    form: Literal["html", "md"] = args.format or ("md" if is_named_md else "html")
    output: Path | None = args.output or (_DEFAULT_OUTPUT if form == "html" else None)
    if output is not None:
        refuse_existing(output)
    with Progress() as progress:
        text, trace = pages.render_report(args.traces, form, datetime.now(), args.steps, progress)
    if output is None:
        print(text, end="")
    else:
        with create_file(output) as file:
            size = file.write(text.encode())
        print(f"{output}: {size / 1000:,.0f} kB")
    return report_problems(trace)
