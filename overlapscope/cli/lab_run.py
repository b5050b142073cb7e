"""Repeat an experiment of the DDP paper where you train, and keep the results.

    overlapscope lab run breakdown
    overlapscope lab run strategies --model convnet --ranks 4 -o experiments/
    torchrun --nnodes 2 --nproc-per-node 8 ... $(which overlapscope) lab run bucket-size
    sudo overlapscope lab cluster --hosts 2 --rate 1gbit -- overlapscope lab run strategies

Without a launcher it starts the ranks on this machine itself; under torchrun, on any number of nodes, it is the rank.
Each trial is a training of its own, recorded; its step time is the one that 'overlapscope summary' prints. Results are
in FOLDER/NAME/results.parquet after every trial. Whatever ends it, the same command goes on where it was.
'overlapscope lab figures' draws them, and 'overlapscope serve' shows them.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from overlapscope.cli import child_process
from overlapscope.cli.arguments import parse_positive_int
from overlapscope.errors import OverlapScopeError

DEFAULT_FOLDER: Final = Path("experiments")
_DEFAULT_RANKS: Final = 2
_DEFAULT_STEPS: Final = 30
_DEFAULT_REPETITIONS: Final = 5
_MIN_STEPS: Final = 10
_LAUNCHER_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", metavar="NAME", help="a name from 'overlapscope lab experiments'")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=DEFAULT_FOLDER,
        metavar="FOLDER",
        help="output folder (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        action="append",
        help="convnet, transformer, small-convnet or small-transformer; repeatable (default: the first two)",
    )
    parser.add_argument(
        "--ranks",
        type=parse_positive_int,
        metavar="N",
        help=f"number of ranks to start on this machine, without a launcher (default: {_DEFAULT_RANKS})",
    )
    parser.add_argument("--backend", help="backend of torch.distributed (default: nccl if there are GPUs, else gloo)")
    parser.add_argument(
        "--strategy", action="append", help="strategy to run in the experiment 'strategies'; repeatable (default: all)"
    )
    parser.add_argument(
        "--steps",
        type=parse_positive_int,
        default=_DEFAULT_STEPS,
        metavar="N",
        help="number of steps of each trial (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions",
        type=parse_positive_int,
        default=_DEFAULT_REPETITIONS,
        metavar="N",
        help="number of repetitions of each setting (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, data and the order of trials (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or become one of them if a launcher started this process."""
    from overlapscope.lab.experiments.registry import get_experiment

    experiment = get_experiment(args.name)
    child_process.require_torch("the lab")
    if args.steps < _MIN_STEPS:
        raise OverlapScopeError(f"--steps {args.steps}: give {_MIN_STEPS} or more; the first three are a warm-up")
    from overlapscope.lab.truth import find_experiment_script

    command = [sys.executable, str(find_experiment_script("rank.py")), *_arguments(args)]
    if all(name in os.environ for name in _LAUNCHER_VARIABLES):
        if args.ranks is not None and str(args.ranks) != os.environ["WORLD_SIZE"]:
            raise OverlapScopeError(
                f"--ranks {args.ranks}: the launcher has started {os.environ['WORLD_SIZE']}; leave it out"
            )
        sys.stdout.flush()
        os.execv(sys.executable, command)
    ranks = args.ranks or _DEFAULT_RANKS
    if ranks < 2:
        raise OverlapScopeError(f"--ranks {ranks}: give 2 or more; one has nobody to reduce gradients with")
    print(f"{experiment.title}: {ranks} ranks on this machine, results in {args.output / experiment.name}", flush=True)
    return _start(command, ranks)


def _arguments(args: argparse.Namespace) -> list[str]:
    """Return a rank's arguments with every option given, so that a rerun does not depend on later defaults."""
    arguments = [args.name, "-o", str(args.output.absolute())]
    for option, values in (("--model", args.model), ("--strategy", args.strategy)):
        for value in values or ():
            arguments += [option, value]
    arguments += [] if args.backend is None else ["--backend", args.backend]
    return [
        *arguments,
        *("--steps", str(args.steps)),
        *("--repetitions", str(args.repetitions)),
        *("--seed", str(args.seed)),
    ]


def _start(command: Sequence[str], ranks: int) -> int:
    """Start the ranks on this machine, wait for them, and return the exit code of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0))
    shared = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        **child_process.environment_without_recording(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    others: list[subprocess.Popen[bytes]] = []
    try:
        with child_process.run_in_foreground(command, {**shared, "RANK": "0", "LOCAL_RANK": "0"}) as (first, _):
            for rank in range(1, ranks):
                rank_environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                others.append(subprocess.Popen(command, env=rank_environment))
            first.wait()
            for process in others:
                process.wait(timeout=30)
    finally:
        for process in others:
            process.kill()
    return child_process.exit_code(first.returncode)
