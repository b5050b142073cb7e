"""Run a training command and record it.

    overlapscope record -o traces/ -- torchrun --nproc-per-node 2 train.py

The script needs no changes: every Python process that the command starts is recorded if it creates a process group,
with or without torch's DistributedDataParallel. With instrumented_ddp.DistributedDataParallel the recording also holds
the copies into buckets and back. If the training fails, or goes wrong without failing, the command says what happened,
as 'overlapscope diagnose' does.

Each attempt of a job that is started again, as by 'torchrun --max-restarts', is a recording of its own: the first in
the folder, the next ones in restart_1, restart_2 ... inside.

With --probe-buckets the training also runs other bucket sizes, for about 24 steps from its fifth on, and then its own
again: from one such recording the cost of any bucket size can be predicted. The training's results are the same. This
needs instrumented_ddp.DistributedDataParallel.

The command keeps the terminal, and its exit code is returned (128 + N if signal N killed it).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from overlapscope.cli import child_process, recording_folder
from overlapscope.cli.arguments import parse_positive_int
from overlapscope.cli.metrics_process import metrics_writer, remove_stale
from overlapscope.cli.recorded import EndedCommand, finish_recording
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import DEFAULT_STALL_TIMEOUT_S, DETAILS, ON_INCIDENT, add_startup_hook


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("traces"), help="folder to record into (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing recording in that folder")
    parser.add_argument(
        "--detail",
        choices=DETAILS,
        help=f"level of detail; 'parameters' also records when each gradient is ready (default: {DETAILS[0]}, "
        f"with --probe-buckets: {DETAILS[1]})",
    )
    parser.add_argument(
        "--probe-buckets",
        action="store_true",
        help="try other bucket sizes for a few steps each; results of the training don't change",
    )
    parser.add_argument(
        "--limit-mb", type=parse_positive_int, metavar="N", help="maximum size of one rank's log, in MB (default: 64)"
    )
    parser.add_argument(
        "--on-incident",
        choices=ON_INCIDENT,
        default=ON_INCIDENT[0],
        help="reaction to a hang or to ranks that disagree: report it, also abort the job, or don't watch the job "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=parse_positive_int,
        metavar="N",
        help="minimum stall before a possibly slow job is aborted with '--on-incident raise', in seconds; more if the "
        f"job has paused for long before (default: {DEFAULT_STALL_TIMEOUT_S:.0f})",
    )
    parser.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write live metrics to FILE for node_exporter's textfile collector; replaces a file of an earlier run",
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command to run")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    command = args.training[1:] if args.training[:1] == ["--"] else args.training
    if not command:
        raise OverlapScopeError("no command to run; give one after '--', as in 'overlapscope record -- torchrun ...'")
    child_process.find_program(command[0])
    if args.metrics:
        remove_stale(args.metrics)
    if args.force:
        recording_folder.clear(args.output)
    elif recording_folder.has_recording(args.output):
        raise OverlapScopeError(f"{args.output}: already holds a recording; give another folder with -o, or --force")
    recording_folder.create_empty_folder(args.output)
    environment = child_process.recording_environment(
        args.output,
        args.detail or DETAILS[args.probe_buckets],
        args.limit_mb,
        args.on_incident,
        args.stall_timeout,
        probe_buckets=args.probe_buckets,
    )
    with metrics_writer(args.output, args.metrics) if args.metrics else nullcontext():
        with child_process.run_in_foreground(command, add_startup_hook(environment)) as (child, received):
            child.wait()
        ended = EndedCommand(program=command[0], pid=child.pid, status=child.returncode, received=received)
        return finish_recording(args.output, ended, _print_status, probed=args.probe_buckets)


def _print_status(text: str) -> None:
    print(f"overlapscope record: {text}", file=sys.stderr)
