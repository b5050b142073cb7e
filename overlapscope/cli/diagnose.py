"""Say why a job hung, crashed or silently went wrong: which rank, step, bucket, parameters and line.

Reads what all ranks left, killed ones included, and compares the order of their collectives. Prints what happened,
where each rank was, what the ranks did around the first difference, and what to try. Takes the folder of a recording,
of a finished or a running job; or one dump of PyTorch's Flight Recorder, or a folder of them.

Of a job that was started again, as by 'torchrun --max-restarts', one line says why each attempt ended; then comes the
diagnosis of the last one, or of the one that --attempt or the folder of a restart asks for.

On a terminal, lines of code are links; OVERLAPSCOPE_EDITOR=vscode (or cursor, pycharm, none) says what opens them.

The exit code is 0 if nothing is wrong, 1 if a fault was found or can't be ruled out, because a part of the recording is
missing or damaged for instance, and 2 if nothing can be read.

With --json the output is one JSON object with the keys
  schema     1
  path       of the attempt
  attempts   of a job that was started again, one object per attempt: number, path, kind, sentence
  verdict    code (of its kind; never changes), kind, sentence, certainty, alternative (what else it could be), restart
             (may-help, cannot-help or not-needed), hosts (of the ranks named), may_be_host (whether a host may be the
             cause), blamed (who did it, if certain), suspected (else), concerned, step (of the loop, from 0), last_step
             (if it began in a step from one to the other), group, number, bucket, parameters, call_sites, windows (what
             each rank did around the first difference), evidence, advice, also
  ranks      one object per rank: rank, host, pid, liveness, step, phase, bucket, call_site, failure
  groups     one object per group: name, ranks, latest (number of its latest collective by rank), first_divergence,
             divergence
  gaps       objects with what and advice: what is missing or damaged, so that "healthy" can't be said
  problems   objects with severity and message: what could not be read
Times are nanoseconds, named *_ns. --print-schema prints the JSON Schema of that object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from overlapscope.cli.arguments import parse_folder
from overlapscope.cli.reading import print_report
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError

if TYPE_CHECKING:
    from overlapscope.diagnosis.attempts import Attempt


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "traces", type=parse_folder, help="folder that 'overlapscope record -o' wrote, or Flight Recorder dumps"
    )
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="attempt of a restarted job, counted from 0 (default: the last one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--print-schema", action=_PrintSchema, nargs=0, help="print the JSON Schema of that object, and exit"
    )


def run(args: argparse.Namespace) -> int:
    """Print the verdict; return 1 if there is a fault, 2 if nothing can be read."""
    from overlapscope.report.diagnosis import build_diagnosis_report
    from overlapscope.report.problems import merge_problems

    try:
        with Progress() as progress:
            shown_attempt, attempts = read_diagnosis(args.traces, args.attempt, progress.count)
    except OverlapScopeError as error:
        print(f"overlapscope diagnose: {error}", file=sys.stderr)
        return 2
    print_report(build_diagnosis_report(shown_attempt, attempts), as_json=args.json)
    for problem in merge_problems(shown_attempt.problems):
        print(f"{problem.severity}: {problem}", file=sys.stderr)
    return 1 if shown_attempt.verdict.is_fault else 0


def read_diagnosis(
    path: Path, number: int | None, progress: Callable[[int, int], None] | None = None
) -> tuple[Attempt, tuple[Attempt, ...]]:
    """Read and diagnose a recording, or Flight Recorder dumps.

    Args:
        path: folder of a recording, of one of its attempts, or of dumps; or one dump.
        number: attempt to return; None for that of the folder, which of a whole run is its last one.
        progress: called for each rank that has been read.

    Returns:
        The attempt, and all attempts if the job was restarted.

    Raises:
        OverlapScopeError: nothing can be read, or there is no such attempt.
    """
    from overlapscope.diagnosis.attempts import read_attempts

    attempts = read_attempts(path)
    chosen = _select_attempt(path, number)
    known = next((each for each in attempts if each.path == chosen), None)
    return known or _read(chosen, progress), attempts


class _PrintSchema(argparse.Action):
    """Action that prints the JSON Schema and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import json

        from overlapscope.report.diagnosis_json import build_schema

        print(json.dumps(build_schema(), indent=1))
        parser.exit()


def _select_attempt(path: Path, number: int | None) -> Path:
    """Return the folder of the attempt to show: the last one by default.

    Raises:
        OverlapScopeError: there is no such attempt.
    """
    from overlapscope.trace.folders import attempt_number, find_sibling_attempts

    if number is None and attempt_number(path):
        return path
    attempts = {attempt_number(attempt): attempt for attempt in find_sibling_attempts(path)}
    if number is None:
        return attempts[max(attempts)] if attempts else path
    if number not in attempts:
        known = ", ".join(map(str, attempts)) or "none"
        raise OverlapScopeError(f"{path}: there is no attempt {number}; attempts: {known}")
    return attempts[number]


def _read(path: Path, progress: Callable[[int, int], None] | None) -> Attempt:
    from overlapscope.diagnosis.attempts import Attempt, read_attempt
    from overlapscope.diagnosis.flight_recorder import read_dumps
    from overlapscope.diagnosis.judge import judge
    from overlapscope.trace.flight_recorder import holds_dumps

    if holds_dumps(path):
        evidence, problems = read_dumps(path)
        return Attempt(path=path, evidence=evidence, verdict=judge(evidence), problems=tuple(problems))
    return read_attempt(path, progress)
