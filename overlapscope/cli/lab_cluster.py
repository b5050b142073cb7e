"""Run a training on emulated hosts with rate- and latency-limited links.

    sudo overlapscope lab cluster --hosts 2 --rate 1gbit --latency 2ms -- torchrun train.py
    sudo overlapscope lab cluster --hosts 4 --rate 100mbit -o traces/ -- torchrun train.py

The command is run once on each host. torchrun needs no options for it: number of hosts, number of this one, ranks per
host and the address of the first are in its environment (PET_NNODES, PET_NODE_RANK ...). With one rank per host a plain
script works too: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.

Hosts are network namespaces with names and addresses of their own (host0, 10.0.0.1 ...). They share this machine's
cores, memory and files. What a host sends to another is held to the rate and delayed by the latency; within a host
nothing is. Lines of output begin with their host.

When the command fails on one host, the others have 10 s to end by themselves, and its exit code is returned. Nothing
is left afterwards. Linux only; needs root, and the programs 'ip' and 'tc' (iproute2). The command runs as root.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from overlapscope.cli import child_process, recording_folder
from overlapscope.cli.arguments import parse_positive_int, strip_dashes
from overlapscope.cli.record import EndedCommand, finish_recording
from overlapscope.errors import OverlapScopeError
from overlapscope.lab import cluster
from overlapscope.lab.network.hosts import Hosts
from overlapscope.lab.network.link import (
    Link,
    find_missing_requirement,
    make_linked_hosts,
    measure_link,
    parse_latency,
    parse_rate,
)
from overlapscope.text import count_of, format_bandwidth, format_ns
from overlapscope.trace.environment import DETAILS, add_startup_hook

_MIN_HOSTS: Final = 2
_MAX_HOSTS: Final = 64
_DEFAULT_RATE: Final = "1gbit"
_TERMINATION_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--hosts",
        type=parse_positive_int,
        default=2,
        metavar="N",
        help="number of hosts, 2 to 64 (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks-per-host",
        type=parse_positive_int,
        default=1,
        metavar="K",
        help="number of ranks per host (default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        default=_DEFAULT_RATE,
        help="rate of each host's link in the notation of tc, 1mbit to 100gbit (default: %(default)s)",
    )
    parser.add_argument(
        "--latency",
        default="0",
        help="one-way latency between hosts, such as 2ms or 500us (default: %(default)s)",
    )
    parser.add_argument("-o", "--output", type=Path, help="folder to record into, as 'overlapscope record' does")
    parser.add_argument(
        "training", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command to run on each host"
    )


def run(args: argparse.Namespace) -> int:
    """Create the hosts, run the command on each, and return its exit code."""
    command = _command(args.training)
    if not _MIN_HOSTS <= args.hosts <= _MAX_HOSTS:
        raise OverlapScopeError(f"--hosts {args.hosts}: give {_MIN_HOSTS} to {_MAX_HOSTS}")
    link = Link(bits_per_s=parse_rate(args.rate), latency_ms=parse_latency(args.latency))
    if missing := find_missing_requirement(link):
        raise OverlapScopeError(missing)
    environment = child_process.environment_without_recording()
    if args.output is not None:
        recording_folder.create_empty_folder(args.output)
        environment = add_startup_hook(child_process.recording_environment(args.output, DETAILS[0]))
    signals: list[int] = []
    with child_process.record_signals(_TERMINATION_SIGNALS, signals.append) as received:
        status = _run_on_hosts(args.hosts, args.ranks_per_host, link, command, environment, signals)
        if args.output is None:
            return child_process.exit_code(status)
        ended = EndedCommand(program=Path(command[0]).name, pid=os.getpid(), status=status, received=received)
        return finish_recording(args.output, ended, _print_status)


def _command(training: Sequence[str]) -> list[str]:
    """Return the command line to run, with the absolute path of its program."""
    command = strip_dashes(training)
    if not command:
        raise OverlapScopeError("no command to run; give one after '--', as in '... lab cluster -- torchrun train.py'")
    program = child_process.find_program(command[0])
    if Path(program).name == "torchrun" and "--standalone" in command:
        raise OverlapScopeError("torchrun --standalone would train on each host alone; leave it out")
    return [str(Path(program).absolute()), *command[1:]]


def _run_on_hosts(
    count: int,
    ranks_per_host: int,
    link: Link,
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: Sequence[int],
) -> int:
    """Run the job and return the status with which it ended; -N if this process received signal N."""
    try:
        with make_linked_hosts(link, count) as hosts:
            if not signals:
                _print_status(_describe_network(hosts, link, ranks_per_host))
            if signals:
                return -signals[0]
            with cluster.run_on_hosts(hosts, command, environment, ranks_per_host, _print_line) as job:
                return job.wait(signals, _report_failure)
    except OverlapScopeError:
        if not signals:
            raise
        return -signals[0]  # Ctrl-C also kills the programs that set up the hosts


def _describe_network(hosts: Hosts, link: Link, ranks_per_host: int) -> str:
    """Describe in one line the requested network, and what two TCP sockets measure on it."""
    assert link.bits_per_s is not None
    seen = measure_link([hosts.command(host) for host in (0, 1)], hosts.address(0), link)
    latency = f" and {format_ns(link.latency_ms * 1e6)} one way" if link.latency_ms else ""
    return (
        f"{len(hosts.namespaces)} hosts, {count_of(ranks_per_host, 'rank')} each, joined at "
        f"{format_bandwidth(link.bits_per_s)}{latency}; measured: round trip {format_ns(seen.rtt_us * 1e3)}, "
        f"one connection carries {format_bandwidth(seen.bytes_per_s * 8)} each way at once"
    )


def _report_failure(host: int, status: int) -> None:
    how = f"with exit code {status}" if status > 0 else f"by {signal.Signals(-status).name}"
    _print_status(
        f"host {host} failed first, {how}; the others have {cluster.GRACE_PERIOD_S:.0f} s to end by themselves"
    )


def _print_line(host: int, line: str) -> None:
    print(f"[host {host}] {line}\n", end="", flush=True)


def _print_status(text: str) -> None:
    print(f"overlapscope lab: {text}", file=sys.stderr, flush=True)
