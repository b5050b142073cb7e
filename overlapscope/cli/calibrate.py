"""Measure how long an all-reduce takes here, by size, as nccl-tests does.

    overlapscope calibrate --nproc 2
    overlapscope calibrate -o traces/calibration.json -- torchrun --nproc-per-node 8
    overlapscope calibrate -o traces/calibration.json --inspector nccl-inspector-1234/*.log

The first form starts ranks on this machine. In the second a launcher starts them where the training runs: give
torchrun the training's options, on every node, but no script. This takes a few seconds, prints a table of time, algbw
and busbw, and writes a file that 'overlapscope recommend' uses if it is in the folder of the recording.

These need PyTorch; run them while nothing else uses the network. The third form takes the times from dumps of NCCL's
Inspector plugin of a job that has run, of all its ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from overlapscope.cli import child_process
from overlapscope.cli.arguments import parse_positive_int, strip_dashes
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of

_MODULE: Final = "instrumented_ddp.calibrate"
_RUN: Final = "torch.distributed.run"
_DEFAULT_RANKS: Final = 2


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("traces/calibration.json"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--nproc",
        type=parse_positive_int,
        metavar="N",
        help=f"number of ranks to start on this machine (default: {_DEFAULT_RANKS})",
    )
    parser.add_argument("--backend", help="backend of torch.distributed (default: nccl if there are GPUs, else gloo)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device of the tensors (default: cuda if there are GPUs)"
    )
    parser.add_argument(
        "--max-mb", type=parse_positive_int, metavar="N", help="largest all-reduce in MB (default: 256)"
    )
    parser.add_argument(
        "--inspector", nargs="+", type=Path, metavar="FILE", help="dumps of NCCL's Inspector, of all ranks of a job"
    )
    parser.add_argument(
        "launcher", nargs=argparse.REMAINDER, metavar="-- LAUNCHER ...", help="command that starts the ranks"
    )


def run(args: argparse.Namespace) -> int:
    """Start the ranks and return the exit code of the launcher."""
    launcher = strip_dashes(args.launcher)
    if launcher and args.nproc:
        raise OverlapScopeError("give either --nproc or a launcher: the launcher decides how many ranks it starts")
    if args.nproc == 1:
        raise OverlapScopeError("all-reduce needs at least 2 ranks; give --nproc 2 or more")
    if args.inspector:
        if launcher or args.nproc:
            raise OverlapScopeError("--inspector: what it reads was measured before; start no ranks as well")
        return _calibrate_from_dumps(args.inspector, args.output)
    child_process.require_torch("calibrate")
    _check_output(args.output)
    local = [sys.executable, "-m", _RUN, "--standalone", "--nproc-per-node", str(args.nproc or _DEFAULT_RANKS)]
    options = ["-o", str(args.output.absolute())]
    for option, value in (("--backend", args.backend), ("--device", args.device), ("--max-mb", args.max_mb)):
        if value is not None:
            options += [option, str(value)]
    command = [*_append_module(launcher or local), *options]
    # Ranks compute nothing; more threads would only compete with the communication for the cores.
    environment = {"OMP_NUM_THREADS": "1", **child_process.environment_without_recording()}
    with child_process.run_in_foreground(command, environment) as (child, _):
        child.wait()
    return child_process.exit_code(child.returncode)


def _calibrate_from_dumps(dumps: Sequence[Path], output: Path) -> int:
    from overlapscope.bucket_model.calibration import TABLE_HEADER, format_sample, write_calibration
    from overlapscope.interop.nccl_inspector import read_inspector_dumps

    with Progress() as progress:
        progress.begin("reading dumps")
        found, left_out = read_inspector_dumps(dumps, progress.count)
    _check_output(output)
    write_calibration(output, found)
    where = count_of(len(set(found.hosts)), "host")
    print(f"all-reduces of {found.world_size} ranks on {where}, {found.backend}, in a job that has run")
    print(TABLE_HEADER)
    for sample in found.samples:
        print(format_sample(sample, found.world_size))
    for what in left_out:
        print(f"left out: {what}")
    print(f"written to {output}")
    return 0


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise OverlapScopeError(f"{output}: this is a folder; give a file, as in -o {output}/calibration.json")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OverlapScopeError(f"{output.parent}: can't be created ({error.strerror})") from None


def _append_module(launcher: Sequence[str]) -> list[str]:
    """Append our module to a launcher's command line, as the program that it runs."""
    if Path(launcher[0]).name == "torchrun" or _RUN in launcher:
        return [*launcher, "-m", _MODULE]
    return [*launcher, sys.executable, "-m", _MODULE]
