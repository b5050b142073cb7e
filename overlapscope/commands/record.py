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
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from overlapscope.commands import child_process, recording_folder
from overlapscope.commands.arguments import positive
from overlapscope.commands.probing_report import choices_in, probing_sentences
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.attempts import newest_attempt
from overlapscope.trace.environment import DEFAULT_PATIENCE_S, DETAILS, ON_INCIDENT, with_startup
from overlapscope.trace.exits import write_exit
from overlapscope.units import format_bytes


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("-o", "--output", type=Path, default=Path("traces"), help="folder to record into (traces)")
    parser.add_argument("--force", action="store_true", help="replace an existing recording in that folder")
    parser.add_argument(
        "--detail",
        choices=DETAILS,
        help=f"'parameters' also records when each gradient is ready ({DETAILS[0]}; with --probe-buckets {DETAILS[1]})",
    )
    parser.add_argument(
        "--probe-buckets",
        action="store_true",
        help="run other bucket sizes for a few steps each; results do not change",
    )
    parser.add_argument("--limit-mb", type=positive, metavar="N", help="maximum size of one rank's log in MB (64)")
    parser.add_argument(
        "--on-incident",
        choices=ON_INCIDENT,
        default=ON_INCIDENT[0],
        help="if the job hangs or ranks disagree: report it, also end the job, or don't watch it (%(default)s)",
    )
    parser.add_argument(
        "--patience-s",
        type=positive,
        metavar="N",
        help="with '--on-incident raise': seconds for which a job that may only be slow stands still at least before "
        f"it is ended ({DEFAULT_PATIENCE_S:.0f}); longer if it has paused for long before",
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command to run")


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
    environment = child_process.recording_environment(
        args.output,
        args.detail or DETAILS[args.probe_buckets],
        args.limit_mb,
        args.on_incident,
        args.patience_s,
        probe_buckets=args.probe_buckets,
    )
    with child_process.running(command, with_startup(environment)) as (child, received):
        child.wait()
    code = child_process.exit_code(child)
    folder = newest_attempt(args.output)
    recorded = recording_folder.describe(folder)
    if recorded is None:
        recording_folder.clear(args.output)
        recording_folder.remove_if_empty(args.output)
        ended = f"ended with exit code {code}" if code else "succeeded"
        _say(
            f"nothing was recorded: '{command[0]}' {ended}, and no Python process it started called "
            f"torch.distributed.init_process_group with overlapscope installed"
        )
        return code or 1
    with suppress(OSError):  # the disk is full
        told_signal, told_ns = received[0] if received else (None, None)
        write_exit(folder, child.pid, child.returncode, told_ns=told_ns, told_signal=told_signal, is_job=True)
    _say_what_went_wrong(folder)
    if args.probe_buckets:
        for sentence in probing_sentences(folder):
            _say(sentence)
    for sentence in choices_in(folder):
        _say(sentence)
    done = _counted(recorded.steps, "step") if recorded.steps else _counted(recorded.collectives, "collective")
    look = "serve" if recorded.steps else "diagnose"
    _say(
        f"recorded {_counted(recorded.ranks, 'rank')}, {done}, {format_bytes(recorded.disk_bytes)} "
        f"in {folder}\nview it: overlapscope {look} {shlex.quote(str(folder))}"
    )
    return code


def _say_what_went_wrong(folder: Path) -> None:
    """Print why each attempt ended if there are several, and the verdict if the newest did not end well."""
    from overlapscope.diagnosis.attempts import attempt_lines, read_attempt, read_attempts
    from overlapscope.diagnosis.report import report_text

    with suppress(OverlapScopeError):  # unreadable: commands that read the recording say so
        attempts = read_attempts(folder)
        if attempts:
            print("\n".join([*attempt_lines(attempts), ""]), file=sys.stderr)
        attempt = attempts[-1] if attempts else read_attempt(folder)
        if attempt.verdict.kind == "interrupted":
            print(attempt.verdict.sentence + "\n", file=sys.stderr)
        elif attempt.verdict.is_fault and attempt.verdict.kind != "cannot tell":
            print(report_text(attempt.verdict, attempt.evidence) + "\n", file=sys.stderr)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _say(text: str) -> None:
    print(f"overlapscope record: {text}", file=sys.stderr)
