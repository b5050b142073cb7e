"""Copy a recording with pseudonyms in place of names, to be given away.

    overlapscope redact traces/ -o copy/ --names names.json

The copy has no names of parameters, modules, files, functions, hosts, variables or threads, no source code, no
arguments of commands, and no messages of exceptions. Equal names have equal pseudonyms on all ranks, so summary,
stragglers, recommend, diagnose, serve and the others show the same ranks, steps, buckets, kinds and numbers. Line
numbers and shapes are kept, and so is what kind of exception ended a rank. Notes, tables, and files that are not part
of a recording are not copied.

With --names you can translate what others tell you about the copy: keep that file. With --key, recordings that you copy
one by one have the same pseudonyms, so that the copies can be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from overlapscope.cli.arguments import parse_folder
from overlapscope.cli.output_file import refuse_existing
from overlapscope.cli.pseudonym_files import add_names_argument, make_key, read_key, refuse_unfit_files, write_names
from overlapscope.errors import OverlapScopeError, make_printable
from overlapscope.text import count_of

_MAX_LISTED: Final = 20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=parse_folder, help="folder that 'overlapscope record -o' wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="COPY", help="folder to create")
    add_names_argument(parser)
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="file with the key of the pseudonyms, made if missing, for you alone (default: a key that nobody keeps)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the copy."""
    from overlapscope.redact.copy import redact_recording
    from overlapscope.trace.confidential.pseudonyms import Pseudonyms

    _refuse_unfit(args.traces, args.output, args.names, args.key)
    is_new = args.key is None or not args.key.exists()
    pseudonyms = Pseudonyms(make_key(args.key) if is_new else read_key(args.key))
    copied = redact_recording(args.traces, args.output, pseudonyms)
    if args.names is not None:
        write_names(args.names, pseudonyms)
    for what in copied.left_out[:_MAX_LISTED]:
        _print_status(f"not in the copy: {what}")
    if (more := len(copied.left_out) - _MAX_LISTED) > 0:
        _print_status(f"not in the copy: {more} more")
    names = count_of(len(pseudonyms.names), "name")
    _print_status(f"copied {count_of(copied.ranks, 'rank')} into {args.output}, with pseudonyms for {names}")
    return 0


def _refuse_unfit(traces: Path, copy: Path, names: Path | None, key: Path | None) -> None:
    """Refuse what can't be copied, and files that would be lost or given away.

    Raises:
        OverlapScopeError: there is no recording, or it is not over; a file exists, or is in the copy.
    """
    from overlapscope.diagnosis.rank_state import is_running
    from overlapscope.trace.early_ends import has_early_ends
    from overlapscope.trace.folders import find_latest_attempt, find_rank_folders

    if not (traces.is_dir() and has_early_ends(traces)):
        find_rank_folders(traces)
    if is_running(find_latest_attempt(traces)):
        raise OverlapScopeError(f"{traces}: is still being recorded; redact it when the job has ended")
    refuse_existing(copy)
    if copy.resolve().is_relative_to(traces.resolve()):
        raise OverlapScopeError(f"{copy}: is inside the recording; give a folder elsewhere with -o")
    refuse_unfit_files(copy, names, key)


def _print_status(text: str) -> None:
    print(f"overlapscope redact: {make_printable(text)}", file=sys.stderr)
