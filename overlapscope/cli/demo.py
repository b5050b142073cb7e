"""Record a short training run on this machine's CPU and show it in the browser.

Trains a small model on two ranks, needs only PyTorch, and takes well under a minute. The recording stays in the folder
that is printed, or that -o names.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from overlapscope.cli import child_process, recording_folder, serve
from overlapscope.cli.arguments import parse_positive_int
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of
from overlapscope.trace.schema import EVENTS_FILE, rank_folder

_RANKS: Final = 2
_POLL_SECONDS: Final = 0.1
_SECONDS_BETWEEN_LINES: Final = 5.0
"""Seconds between two lines on the progress where no bar can be drawn."""
_TAIL_LINES: Final = 60
"""Lines of the log to print after a failure: torchrun's own report takes 40 of them, and the traceback is before it."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("-o", "--output", type=Path, help="folder to record into (default: a new temporary one)")
    parser.add_argument(
        "--steps",
        type=parse_positive_int,
        default=40,
        metavar="N",
        help="number of training steps (default: %(default)s)",
    )
    parser.add_argument("--no-serve", action="store_true", help="record and print the verdict, but don't serve")
    serve.prepare_server(parser)


def run(args: argparse.Namespace) -> int:
    """Record a training run, print its summary, and serve it until Ctrl-C."""
    from overlapscope.analysis import Analysis
    from overlapscope.breakdown.text import describe_summary
    from overlapscope.trace.recording import read_trace

    child_process.require_torch("the demo")
    folder = args.output or Path(tempfile.mkdtemp(prefix="overlapscope-demo-"))
    recording_folder.create_empty_folder(folder)
    print(f"recording {count_of(args.steps, 'step')} on {_RANKS} ranks into {folder}", flush=True)
    code = _train(folder, args.steps)
    if code:
        return code
    trace = read_trace(folder)
    print(describe_summary(Analysis(trace).summary), flush=True)
    if args.no_serve:
        print(f"view it: overlapscope serve {folder}")
        return 0
    args.traces = [folder]
    return serve.run(args)


def _train(folder: Path, steps: int) -> int:
    """Run the training with a progress bar, and return its exit code."""
    # One thread per rank: on few cores, more would only compete with the other rank's and with the communication.
    environment = child_process.recording_environment(folder, "parameters") | {"OMP_NUM_THREADS": "1"}
    training_log = folder / "training.log"
    with (
        training_log.open("wb") as output,
        child_process.run_in_foreground(_training_command(steps), environment, output) as (child, received),
    ):
        _show_progress(child, folder, steps)
    if received:
        return 128 + received[0].number
    code = child_process.exit_code(child.returncode)
    if code or recording_folder.describe(folder) is None:
        for line in training_log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]:
            print(f"  {line}", file=sys.stderr)
        what = f"failed (exit code {code})" if code else "recorded nothing"
        raise OverlapScopeError(f"the training {what}; see {training_log}")
    return 0


def _training_command(steps: int) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS)]
    return [*launch, str(_training_script()), "--steps", str(steps), "--bucket-cap-mb", "1"]


def _training_script() -> Path:
    """Return the path of ``examples/train_gpt.py``: inside the package once installed, beside it in a clone."""
    spec = find_spec("instrumented_ddp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    installed = package / "examples" / "train_gpt.py"
    return installed if installed.exists() else package.parent / "examples" / "train_gpt.py"


def _show_progress(child: child_process.Child, folder: Path, steps: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from overlapscope.trace.event_log import read_latest_step

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps)
        began_s = said_s = time.monotonic()
        while child.poll() is None:
            done = min(read_latest_step(rank_folder(folder, 0) / EVENTS_FILE) or 0, steps)
            progress.update(task, completed=done)
            if not console.is_terminal and time.monotonic() - said_s > _SECONDS_BETWEEN_LINES:
                said_s = time.monotonic()
                where = f"step {done} of {steps}" if done else "starting"
                print(f"training: {where}, {said_s - began_s:.0f} s", file=sys.stderr, flush=True)
            time.sleep(_POLL_SECONDS)
        if child.returncode == 0:
            progress.update(task, completed=steps)
