"""Generate a synthetic recording to estimate disk, time and memory.

    overlapscope lab synth --ranks 1024 --steps 1000 --buckets 50 -o traces/planned

Hosts have eight ranks each and clocks of their own; steps take about 85 ms, and one rank computes 10 % longer than the
others. Pages say that it is made up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapscope.cli import recording_folder
from overlapscope.cli.arguments import parse_positive_int
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of, format_bytes

_RANKS = 64
_STEPS = 200
_BUCKETS = 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--ranks", type=parse_positive_int, default=_RANKS, metavar="N", help="number of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=parse_positive_int, default=_STEPS, metavar="N", help="number of steps (default: %(default)s)"
    )
    parser.add_argument(
        "--buckets",
        type=parse_positive_int,
        default=_BUCKETS,
        metavar="N",
        help="number of all-reduces in a step (default: %(default)s)",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder for the recording")


def run(args: argparse.Namespace) -> int:
    """Write the synthetic recording."""
    import shutil

    from overlapscope.lab.synth import estimate_bytes, write_recording

    recording_folder.create_empty_folder(args.output)
    needed, free = estimate_bytes(args.ranks, args.steps, args.buckets), shutil.disk_usage(args.output).free
    if needed > free:
        raise OverlapScopeError(
            f"{args.output}: this would take {format_bytes(needed)}, and {format_bytes(free)} are free; ask for less"
        )
    with Progress() as progress:
        progress.begin("writing ranks")
        write_recording(args.output, args.ranks, args.steps, args.buckets, progress.count)
    print(f"{args.output}: {count_of(args.ranks, 'rank')}, {count_of(args.steps, 'step')}, {format_bytes(needed)}")
    print(f"  overlapscope summary {args.output}")
    return 0
