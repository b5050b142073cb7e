"""Run a training command and record it.

    overlapscope record -o traces/ -- torchrun --nproc-per-node 2 train.py

The script needs no changes: every Python process that the command starts is recorded if it creates a process group,
with or without torch's DistributedDataParallel. With instrumented_ddp.DistributedDataParallel the recording also holds
the copies into buckets and back. If the training fails, or goes wrong without failing, the command says what happened,
as 'overlapscope diagnose' does.

Each attempt of a job that is started again, as by 'torchrun --max-restarts', is a recording of its own: the first in
the folder, the next ones in restart_1, restart_2 ... inside.

If each host of a job runs this command itself, give all of them --join and one folder, on a file system that all hosts
share. The job is known by SLURM_JOB_ID, by torchrun's --rdzv-id and --rdzv-endpoint, or by MASTER_ADDR and MASTER_PORT,
and no other job's ranks are let in.

With --probe-buckets the training also runs other bucket sizes, for about 24 steps from its fifth on, and then its own
again: from one such recording the cost of any bucket size can be predicted. The training's results are the same. This
needs instrumented_ddp.DistributedDataParallel.

With --confidential nobody but you gets to see names of parameters, files, hosts and the like. While the job runs they
are in a folder on this host, in $TMPDIR, that only you can read. Then the recording is made: a copy with pseudonyms, as
by 'overlapscope redact'. What is printed has names.

The command keeps the terminal, and its exit code is returned (128 + N if signal N killed it).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.cli import child_process, joined_job, recording_folder
from overlapscope.cli.arguments import parse_positive_int, strip_dashes
from overlapscope.cli.child_process import ReceivedSignal
from overlapscope.cli.confidential_job import ConfidentialJob
from overlapscope.cli.metrics_process import metrics_writer, remove_stale
from overlapscope.cli.pseudonym_files import add_names_argument
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of, format_bytes, rank_list
from overlapscope.trace.environment import DEFAULT_STALL_TIMEOUT_S, DETAILS, ON_INCIDENT, add_startup_hook
from overlapscope.trace.folders import find_latest_attempt, remove_if_empty
from overlapscope.trace.json_files import parse_json_text
from overlapscope.trace.regular_file import read_regular_file
from overlapscope.trace.schema import RUN_FILE

_CALIBRATE_HINT: Final = "measure with 'overlapscope calibrate'"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("traces"), help="folder to record into (default: %(default)s)"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--force", action="store_true", help="replace an existing recording in that folder")
    existing.add_argument(
        "--join", action="store_true", help="record into one folder with the same job's commands on other hosts"
    )
    parser.add_argument(
        "--detail",
        choices=DETAILS,
        help=f"level of detail; 'parameters' also records when each gradient is ready (default: {DETAILS[0]}, "
        f"with --probe-buckets: {DETAILS[1]})",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--sample",
        type=parse_positive_int,
        metavar="N",
        help="record one step in N in full, the others lightly, without copies (default: 1)",
    )
    which.add_argument(
        "--start-off",
        action="store_true",
        help="record no steps until 'overlapscope control' turns recording on; the watchdog is on from the start",
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
    parser.add_argument(
        "--confidential", action="store_true", help="record pseudonyms in place of names; see docs/confidential.md"
    )
    add_names_argument(parser)
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="file with the key of the pseudonyms, the same on all hosts (default: a key that nobody keeps)",
    )
    parser.add_argument("training", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command to run")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    command = strip_dashes(args.training)
    if not command:
        raise OverlapScopeError("no command to run; give one after '--', as in 'overlapscope record -- torchrun ...'")
    child_process.find_program(command[0])
    confidential = _find_confidential(args)
    if args.metrics:
        remove_stale(args.metrics)
    _prepare_folder(args, command, confidential)
    with ExitStack() as until_finished:
        folder = args.output
        if confidential is not None:
            folder = until_finished.enter_context(confidential.private_folder(_print_status))
        environment = child_process.recording_environment(
            folder,
            args.detail or DETAILS[args.probe_buckets],
            args.limit_mb,
            args.on_incident,
            args.stall_timeout,
            probe_buckets=args.probe_buckets,
            every=0 if args.start_off else args.sample,
            is_confidential=args.confidential,
        )
        if args.metrics:
            until_finished.enter_context(metrics_writer(folder, args.metrics))
        with child_process.run_in_foreground(command, add_startup_hook(environment)) as (child, received):
            child.wait()
        ended = EndedCommand(
            program=command[0],
            pid=child.pid,
            status=child.returncode,
            received=received,
            awaited_nodes=joined_job.count_awaited_nodes(command),
        )
        return finish_recording(
            folder,
            ended,
            _print_status,
            probed=args.probe_buckets,
            is_joined=args.join,
            confidential=confidential,
        )


def _find_confidential(args: argparse.Namespace) -> ConfidentialJob | None:
    if args.confidential and args.metrics:
        raise OverlapScopeError("--metrics: names hosts, so it can't be given with --confidential")
    if args.confidential:
        return ConfidentialJob(args.output, args.names, args.key, is_joined=args.join)
    for option, given in (("--names", args.names), ("--key", args.key)):
        if given is not None:
            raise OverlapScopeError(f"{option}: is for pseudonyms; give --confidential too")
    return None


def _prepare_folder(args: argparse.Namespace, command: Sequence[str], confidential: ConfidentialJob | None) -> None:
    if args.join:
        job = joined_job.find_job(command)
        joined_job.join_folder(args.output, job if confidential is None else confidential.hide_name(job))
        return
    if args.force:
        recording_folder.clear(args.output)
    elif recording_folder.has_recording(args.output):
        raise OverlapScopeError(f"{args.output}: already holds a recording; give another folder with -o, or --force")
    recording_folder.create_empty_folder(args.output)


def _print_status(text: str) -> None:
    print(f"overlapscope record: {text}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class EndedCommand:
    """How a recorded command ended."""

    program: str
    """Name of the program, as the user wrote it."""
    pid: int
    status: int
    """Exit status of the command; -N if signal N killed it."""
    received: Sequence[ReceivedSignal]
    """Signals that this process received and that were meant for the command."""
    awaited_nodes: int = 1
    """Number of nodes that it waits for before it starts a rank."""


def finish_recording(
    folder: Path,
    ended: EndedCommand,
    print_status: Callable[[str], None],
    *,
    probed: bool = False,
    is_joined: bool = False,
    confidential: ConfidentialJob | None = None,
) -> int:
    """Write into the recording how the job ended, and print what went wrong and how to view the recording.

    Args:
        folder: Folder of the recording; it is removed if nothing was recorded and it is empty.
        print_status: prints a sentence, prefixed with the name of the command.
        probed: other bucket plans were requested.
        is_joined: commands on other hosts record into the folder too; nothing is removed from it.
        confidential: makes the recording of what is in the folder; None if that is the recording.

    Returns:
        The command's exit code: the job's, or 1 if nothing was recorded, or not copied.
    """
    from overlapscope.trace.early_ends import has_early_ends
    from overlapscope.trace.process_files import write_exit

    code = child_process.exit_code(ended.status)
    attempt = find_latest_attempt(folder)
    recorded = recording_folder.describe(attempt)
    if recorded is None and not has_early_ends(folder):
        if not is_joined:
            recording_folder.clear(folder)
            remove_if_empty(folder)
        print_status(_describe_nothing(ended, code))
        return code or 1
    with suppress(OSError):  # the disk is full
        signal_received, signaled_at_ns = ended.received[0] if ended.received else (None, None)
        write_exit(
            attempt,
            ended.pid,
            ended.status,
            signaled_at_ns=signaled_at_ns,
            signal_received=signal_received,
            is_command=True,
        )
    shown = attempt if confidential is None else confidential.publish(folder, print_status)
    if is_joined:
        joined_job.wait_for_other_hosts(attempt)
        recorded = recording_folder.describe(shown)
    _print_verdict(shown if is_joined else attempt, str if confidential is None else confidential.reveal)
    if recorded is None:
        print_status(
            f"no rank came to init_process_group; diagnose it again: overlapscope diagnose {shlex.quote(str(shown))}"
        )
        return code or 1
    for sentence in _describe_run(attempt, probed=probed):
        print_status(sentence)
    print_status(_describe_recorded(recorded, shown))
    is_copied = confidential is None or confidential.is_published
    return code or int(not is_copied)


def _describe_run(attempt: Path, *, probed: bool) -> list[str]:
    from overlapscope.trace.description import describe_auto_choices

    runs = _read_runs(attempt)
    probing = describe_probing(attempt) if probed else []
    return [*probing, *describe_auto_choices({"models": _models_of(runs)}), *describe_recorders(runs)]


def _describe_recorded(recorded: recording_folder.RecordingSize, folder: Path) -> str:
    done = count_of(recorded.steps, "step") if recorded.steps else count_of(recorded.collectives, "collective")
    look = "serve" if recorded.steps else "diagnose"
    return (
        f"recorded {count_of(recorded.ranks, 'rank')}, {done}, {format_bytes(recorded.disk_bytes)} "
        f"in {folder}\nview it: overlapscope {look} {shlex.quote(str(folder))}"
    )


def _describe_nothing(ended: EndedCommand, code: int) -> str:
    how = f"ended with exit code {code}" if code else "succeeded"
    is_waiting = code != 0 and ended.awaited_nodes > 1
    hint = f"; torchrun starts no rank before it runs on {ended.awaited_nodes} nodes (--nnodes)" if is_waiting else ""
    return (
        f"nothing was recorded: '{ended.program}' {how}, and no Python process it started called "
        f"torch.distributed.init_process_group with overlapscope installed{hint}"
    )


def _print_verdict(folder: Path, reveal: Callable[[str], str] = str) -> None:
    """Print why each attempt ended if there are several, and the verdict if the last one failed.

    Args:
        reveal: returns a text with names in place of pseudonyms.
    """
    from overlapscope.diagnosis.attempts import format_attempts, read_attempt, read_attempts
    from overlapscope.diagnosis.report_text import format_report

    with suppress(OverlapScopeError):  # unreadable: commands that read the recording report it
        attempts = read_attempts(folder)
        if attempts:
            print(reveal("\n".join([*format_attempts(attempts), ""])), file=sys.stderr)
        attempt = attempts[-1] if attempts else read_attempt(folder)
        if attempt.verdict.kind == "interrupted":
            print(reveal(attempt.verdict.sentence) + "\n", file=sys.stderr)
        elif attempt.verdict.is_fault and attempt.verdict.kind != "cannot tell":
            print(reveal(format_report(attempt.verdict, attempt.evidence)) + "\n", file=sys.stderr)


def describe_probing(folder: Path) -> list[str]:
    """Describe in one sentence per model of the lowest rank whether plans were probed, or why there is no model."""
    models = _models_of(_read_runs(folder))
    if not models:
        return [f"no bucket plans were probed: the training has no DistributedDataParallel; {_CALIBRATE_HINT} instead"]
    sentences = dict.fromkeys(_describe_model_probing(model.get("probing")) for model in models)
    if len(sentences) == 1:
        return list(sentences)
    return [
        f"model {model['model']} ({model['class']}): {_describe_model_probing(model.get('probing'))}"
        for model in models
    ]


def describe_recorders(runs: Mapping[int, dict[str, Any]]) -> list[str]:
    """Say which recorder has recorded: the one in C or, with the reason, its slower twin in Python.

    Args:
        runs: content of ``run.json`` by rank.
    """
    recorders = {rank: run.get("recorder", {}) for rank, run in runs.items()}
    in_python: dict[str, list[int]] = {}
    for rank, recorder in recorders.items():
        if recorder.get("language") == "Python":
            in_python.setdefault(str(recorder.get("why", "")), []).append(rank)
    if not in_python:
        return ["recorded by the recorder in C"] if any(recorders.values()) else []
    return [
        f"{'' if len(ranks) == len(runs) else f'{rank_list(ranks)}: '}recorded by the slower recorder in Python: {why}"
        for why, ranks in in_python.items()
    ]


def _models_of(runs: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the lowest rank knows of its models; empty if it left nothing."""
    return next((list(run["models"]) for run in runs.values() if isinstance(run.get("models"), list)), [])


def _read_runs(folder: Path) -> dict[int, dict[str, Any]]:
    """Read what each rank knows of the run, as far as it can be read, the lowest rank first."""
    runs = {}
    for file in folder.glob(f"rank_*/{RUN_FILE}"):
        with suppress(OSError, ValueError, TypeError):
            runs[int(file.parent.name.removeprefix("rank_"))] = dict(parse_json_text(read_regular_file(file)))
    return dict(sorted(runs.items()))


def _describe_model_probing(probing: dict[str, Any] | None) -> str:
    if probing is None:
        return (
            "no bucket plans were probed: the plan of torch's own DistributedDataParallel can't be changed; use "
            f"instrumented_ddp.DistributedDataParallel, or {_CALIBRATE_HINT}"
        )
    if probing["state"] == "impossible":
        return f"no bucket plans were probed: {probing['why']}; {_CALIBRATE_HINT} instead"
    if "steps" not in probing:
        return "no bucket plans were probed: the training has fewer than 2 steps"
    begins, ends = probing["first_step"], probing["first_step"] + probing["steps"]
    if probing["state"] == "done":
        return f"probed {probing['plans']} bucket plans in steps {begins} to {ends - 1}"
    too_few = f"{probing['plans']} plans take {ends + 1} steps, outside join(); train for longer"
    if probing["state"] == "begun":
        return f"probed bucket plans for only part of their steps: {too_few}"
    return f"no bucket plans were probed: too few steps; {too_few}"
