"""Run a training command and record it.

    overlapscope record -o traces/ -- torchrun --nproc-per-node 2 train.py

The script must wrap its model in instrumented_ddp.DistributedDataParallel; it need not name a folder. The command
keeps the terminal, and its exit code is returned (128 + N if signal N killed it).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from overlapscope.commands import child_process, recording_folder
from overlapscope.commands.arguments import positive
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import DETAILS
from overlapscope.units import format_bytes


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("-o", "--output", type=Path, default=Path("traces"), help="folder to record into (traces)")
    parser.add_argument("--force", action="store_true", help="replace the recording in that folder, if there is one")
    parser.add_argument(
        "--detail",
        choices=DETAILS,
        default=DETAILS[0],
        help="'parameters' also records when each gradient is ready (%(default)s)",
    )
    parser.add_argument("--limit-mb", type=positive, metavar="N", help="most disk space of one rank's log in MB (64)")
    parser.add_argument("training", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    command = args.training[1:] if args.training[:1] == ["--"] else args.training
    if not command:
        raise OverlapScopeError("no command to run; give one after '--', as in 'overlapscope record -- torchrun ...'")
    child_process.find_program(command[0])
    if args.force:
        recording_folder.clear(args.output)
    elif recording_folder.holds_recording(args.output):
        raise OverlapScopeError(f"{args.output}: already holds a recording; give another folder with -o, or --force")
    recording_folder.make_ready(args.output)
    environment = child_process.recording_environment(args.output, args.detail, args.limit_mb)
    with child_process.running(command, environment) as (child, _):
        child.wait()
    code = child_process.exit_code(child)
    recorded = recording_folder.describe(args.output)
    if recorded is None:
        recording_folder.remove_if_empty(args.output)
        ended = f"ended with exit code {code}" if code else "ended well"
        _say(
            f"nothing was recorded: '{command[0]}' {ended} and never built "
            "instrumented_ddp.DistributedDataParallel, which the script must use in place of torch's"
        )
        return code or 1
    _say(
        f"recorded {recorded.ranks} ranks, {recorded.steps} steps, {format_bytes(recorded.disk_bytes)} "
        f"in {args.output}\nlook at it: overlapscope serve {shlex.quote(str(args.output))}"
    )
    return code


def _say(text: str) -> None:
    print(f"overlapscope record: {text}", file=sys.stderr)
