"""Training command as a child process in the foreground: environment, signals and exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO, Final, NamedTuple

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.ddp_trial import TRIAL_VARIABLE
from overlapscope.trace.environment import (
    CONFIDENTIAL_VARIABLE,
    DETAIL_VARIABLE,
    LIMIT_VARIABLE,
    ON_INCIDENT_VARIABLE,
    PROBE_VARIABLE,
    SAMPLE_VARIABLE,
    STALL_TIMEOUT_VARIABLE,
    TRACE_VARIABLE,
    Detail,
    OnIncident,
)

Child = subprocess.Popen[bytes]

_VARIABLES: Final = (
    *(TRACE_VARIABLE, DETAIL_VARIABLE, LIMIT_VARIABLE),
    *(ON_INCIDENT_VARIABLE, STALL_TIMEOUT_VARIABLE, PROBE_VARIABLE, SAMPLE_VARIABLE),
    *(TRIAL_VARIABLE, CONFIDENTIAL_VARIABLE),
)


class ReceivedSignal(NamedTuple):
    """A signal that this process received and that is meant for the command."""

    number: int
    time_ns: int
    """Time of reception, on the clock that recordings of this host use."""


def recording_environment(
    folder: Path,
    detail: Detail,
    limit_mb: int | None = None,
    on_incident: OnIncident = "report",
    stall_timeout_s: int | None = None,
    *,
    probe_buckets: bool = False,
    every: int | None = None,
    is_confidential: bool = False,
) -> dict[str, str]:
    """Return this process's environment, plus the variables that make a training process record.

    Args:
        limit_mb: maximum size of one rank's log in MB; None for the default.
        on_incident: what watchdogs do when they detect an incident.
        stall_timeout_s: stall timeout in seconds before a possibly slow job is aborted; None for the default.
        probe_buckets: also run other bucket plans for a few steps each.
        every: which steps are recorded in full, as in ``RecordingMode``; None for the default.
        is_confidential: the folder is private to this host.
    """
    recording = {TRACE_VARIABLE: str(folder.absolute()), DETAIL_VARIABLE: detail, ON_INCIDENT_VARIABLE: on_incident}
    if limit_mb is not None:
        recording[LIMIT_VARIABLE] = str(limit_mb)
    if stall_timeout_s is not None:
        recording[STALL_TIMEOUT_VARIABLE] = str(stall_timeout_s)
    if probe_buckets:
        recording[PROBE_VARIABLE] = "1"
    if every is not None:
        recording[SAMPLE_VARIABLE] = str(every)
    if is_confidential:
        recording[CONFIDENTIAL_VARIABLE] = "1"
    # An inherited variable would otherwise replace the default of an option that is not given.
    return environment_without_recording() | recording


def environment_without_recording() -> dict[str, str]:
    """Return this process's environment without the variables that make a process record."""
    return {name: value for name, value in os.environ.items() if name not in _VARIABLES}


@contextmanager
def run_in_foreground(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> Iterator[tuple[Child, list[ReceivedSignal]]]:
    """Run a command in the foreground of this terminal, and leave the handling of Ctrl-C and SIGTERM to it.

    So the child shuts down as it does without us, and this process outlives it: wait for the child inside the context.
    The terminal sends Ctrl-C to the child itself. SIGTERM reaches only this process and is forwarded. A signal that is
    ignored, as Ctrl-C is under nohup, is ignored by the child too.

    Args:
        output: file for its stdout and stderr; None to inherit ours.

    Yields:
        The child, and the list of signals received so far.

    Raises:
        OverlapScopeError: there is no such command.
    """
    child: Child | None = None

    def forward_signal(number: int) -> None:
        if number == signal.SIGTERM and child is not None:
            child.send_signal(number)

    with record_signals((signal.SIGINT, signal.SIGTERM), forward_signal) as received:
        child = _start(command, environment, output)
        if any(each.number == signal.SIGTERM for each in received):  # received before there was a child
            child.send_signal(signal.SIGTERM)
        yield child, received


@contextmanager
def record_signals(
    numbers: Sequence[signal.Signals], on_signal: Callable[[int], None] | None = None
) -> Iterator[list[ReceivedSignal]]:
    """Record signals instead of being terminated by them; one that is ignored, as Ctrl-C is under nohup, stays so.

    Args:
        on_signal: called with the number of each.

    Yields:
        The list of signals received so far.
    """
    from overlapscope.trace.clocks import host_now_ns  # not in the handler, which has to be quick

    received: list[ReceivedSignal] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(ReceivedSignal(number, host_now_ns()))
        if on_signal is not None:
            on_signal(number)

    noted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in noted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None) -> Child:
    program = find_program(command[0])
    try:
        return subprocess.Popen([program, *command[1:]], env=environment, stdout=output, stderr=output)
    except OSError as error:
        hint = "; put 'python' or 'torchrun' before a script" if command[0].endswith(".py") else ""
        raise OverlapScopeError(f"{command[0]}: can't be started ({error.strerror}){hint}") from None


def require_torch(who: str) -> None:
    """Raise an error if PyTorch is not installed.

    Args:
        who: What needs it.
    """
    if find_spec("torch") is None:
        raise OverlapScopeError(f"{who} needs PyTorch, which is missing; pip install 'overlapscope[torch]'")


def find_program(name: str) -> str:
    """Return the path of a program: on PATH, or beside this Python, as in a virtual environment that isn't activated.

    Raises:
        OverlapScopeError: it is in neither.
    """
    beside = Path(sys.executable).parent / name
    program = shutil.which(name) or (shutil.which(beside) if os.sep not in name else None)
    if program is None:
        is_script = name.endswith(".py") and Path(name).exists()
        hint = "put 'python' or 'torchrun' before a script" if is_script else "check the spelling, or give its path"
        raise OverlapScopeError(f"{name}: no such command; {hint}")
    return program


def exit_code(status: int) -> int:
    """Convert the return code of a ``Popen`` to a shell's exit code: 128 + N if signal N killed the child."""
    return 128 - status if status < 0 else status
