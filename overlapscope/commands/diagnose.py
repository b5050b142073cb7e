"""Say why a job hung, crashed or silently went wrong: which rank, step, bucket, parameters and line.

Reads what all ranks left, killed ones included, and compares the order of their collectives. Prints what happened,
where each rank was, what the ranks did around the first difference, and what to try. Takes the folder of a recording,
of a finished or a running job; or one dump of PyTorch's Flight Recorder, or a folder of them.

The exit code is 0 if nothing is wrong, 1 if a fault was found or can't be ruled out, because a part of the recording is
missing or damaged for instance, and 2 if nothing can be read.

With --json the output is one JSON object with the keys
  path
  verdict    kind, sentence, certainty, alternative (what else it could be), blamed (who did it, if certain), suspected
             (else), concerned, step (of the loop, from 0), group, number, bucket, parameters, call_sites, windows (what
             each rank did around the first difference), evidence, advice, also
  ranks      one object per rank: rank, host, pid, liveness, step, phase, bucket, call_site, failure
  groups     one object per group: name, ranks, newest (number of its newest collective by rank), first_divergence,
             divergence
  gaps       objects with what and advice: what is missing or damaged, so that "healthy" can't be said
  problems   objects with severity and message: what could not be read
Times are nanoseconds, named *_ns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overlapscope.errors import OverlapScopeError

if TYPE_CHECKING:
    from overlapscope.diagnosis.evidence import Evidence
    from overlapscope.trace.log import Problem


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "traces", type=Path, help="the folder that 'overlapscope record -o' wrote, or Flight Recorder dumps"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 1 if there is a fault, 2 if nothing can be read."""
    from overlapscope.commands.diagnose_report import as_json
    from overlapscope.diagnosis.judge import judge
    from overlapscope.diagnosis.report import report_text

    try:
        evidence, problems = _read(args.traces)
    except OverlapScopeError as error:
        print(f"overlapscope diagnose: {error}", file=sys.stderr)
        return 2
    verdict = judge(evidence)
    print(as_json(args.traces, verdict, evidence, problems) if args.json else report_text(verdict, evidence))
    for problem in problems:
        print(f"{problem.severity}: {problem}", file=sys.stderr)
    return 1 if verdict.is_fault else 0


def _read(path: Path) -> tuple[Evidence, list[Problem]]:
    """Read a recording, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from overlapscope.diagnosis.from_flight_recorder import read_dumps
    from overlapscope.diagnosis.from_logs import read_evidence
    from overlapscope.trace.flight_recorder_files import holds_dumps

    if holds_dumps(path):
        return read_dumps(path)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading logs", total=None)
        return read_evidence(path, lambda done, ranks: progress.update(task, completed=done, total=ranks))
