"""Runs of a training command for ``overlapscope tune``: started, recorded, ended after some steps, and read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope.cli import child_process, recording_folder
from overlapscope.errors import OverlapScopeError, make_printable
from overlapscope.trace.ddp_trial import Trial
from overlapscope.trace.environment import add_startup_hook
from overlapscope.trace.folders import find_latest_attempt, find_recorded_ranks
from overlapscope.trace.json_files import read_json
from overlapscope.trace.schema import EVENTS_FILE, RUN_FILE

if TYPE_CHECKING:
    from overlapscope.analysis import Analysis

OUTPUT_FILE: Final = "output.log"
"""File in the folder of a run with what the training prints."""
_POLL_S: Final = 0.5
_PATIENCE_S: Final = 40.0
"""Time to end after SIGTERM; torchrun gives its ranks 30 s."""


class RunInterrupted(Exception):  # noqa: N818 - no error
    """This process was asked to end, and the training has ended.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RunFailed(OverlapScopeError):  # noqa: N818 - it names what has failed
    """The training ended with an error."""


class TuningRuns:
    """The runs in one folder, a recording each.

    Args:
        folder: folder of all runs.
        command: training command.
        steps: number of steps after which a run is ended.
    """

    def __init__(self, folder: Path, command: Sequence[str], steps: int) -> None:
        self._folder = folder
        self._command = command
        self._steps = steps
        self._count = 0

    def run(self, name: str, trial: Trial, on_step: Callable[[int, int], None], *, probes: bool = False) -> Analysis:
        """Run the training once, and return the analysis of its recording.

        Args:
            name: name of the setting.
            on_step: called now and then with the number of steps done and of those to do.
            probes: also run other bucket plans before the steps that count, if the model can.

        Raises:
            RunFailed: the training failed, or nothing was recorded.
            RunInterrupted: this process was asked to end.
        """
        from overlapscope.analysis import Analysis
        from overlapscope.trace.recording import read_trace

        self._count += 1
        folder = self._folder / f"{self._count}_{re.sub('[^A-Za-z0-9.]+', '_', name).strip('_')}"
        recording_folder.create_empty_folder(folder)
        environment = child_process.recording_environment(folder, "parameters", None, "raise", probe_buckets=probes)
        environment = add_startup_hook(environment | trial.to_environment())
        status = self._train(folder, environment, on_step)
        attempt = find_latest_attempt(folder)
        if status:
            raise RunFailed(f"{_explain(attempt, status, folder / OUTPUT_FILE)} (its output: {folder / OUTPUT_FILE})")
        if not find_recorded_ranks(attempt):
            raise RunFailed(
                f"nothing was recorded: '{self._command[0]}' succeeded, and no Python process that it started called "
                "torch.distributed.init_process_group with overlapscope installed"
            )
        return Analysis(read_trace(attempt))

    def _train(self, folder: Path, environment: dict[str, str], on_step: Callable[[int, int], None]) -> int:
        """Run the command until it ends or has done its steps; return its status, 0 if it was ended here."""
        from overlapscope.trace.clocks import host_now_ns
        from overlapscope.trace.process_files import write_exit

        program = child_process.find_program(self._command[0])
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with child_process.record_signals(numbers) as received, (folder / OUTPUT_FILE).open("wb") as output:
            try:
                # In a session of its own, so that Ctrl-C reaches it once, from here, and all of it can be ended.
                child = subprocess.Popen(
                    [program, *self._command[1:]],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise OverlapScopeError(f"{self._command[0]}: can't be started ({error.strerror})") from None
            is_done, signaled_at_ns = False, None
            try:
                while child.poll() is None and not received and not is_done:
                    time.sleep(_POLL_S)
                    done, probed = _count_steps(folder)
                    on_step(min(done, self._steps + probed), self._steps + probed)
                    is_done = done >= self._steps + probed
            finally:
                if child.poll() is None:
                    signaled_at_ns = host_now_ns()
                _end(child, lambda: len(received) > 1)
        with suppress(OSError):  # the disk is full
            attempt = find_latest_attempt(folder)
            write_exit(
                attempt,
                child.pid,
                child.returncode,
                signaled_at_ns=signaled_at_ns,
                signal_received=None if signaled_at_ns is None else int(signal.SIGTERM),
                is_command=True,
            )
        if received:
            raise RunInterrupted(received[0].number)
        return 0 if is_done else child.returncode


def has_runs(folder: Path) -> bool:
    """Return whether a folder holds a recording, or runs of an earlier tuning."""
    return recording_folder.has_recording(folder) or any(True for _ in list_runs(folder))


def list_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder."""
    for each in sorted(folder.glob("*_*")) if folder.is_dir() else ():
        if re.match(r"\d+_", each.name) and ((each / OUTPUT_FILE).exists() or recording_folder.has_recording(each)):
            yield each


def clear_runs(folder: Path) -> None:
    """Remove the runs of an earlier tuning, and a recording, but no other files in a folder."""
    from overlapscope.trace.folders import remove_if_empty

    recording_folder.clear(folder)
    for each in list(list_runs(folder)):
        recording_folder.clear(each)
        with suppress(OSError):
            (each / OUTPUT_FILE).unlink(missing_ok=True)
            (each / "calibration.json").unlink(missing_ok=True)
            remove_if_empty(each)


def _count_steps(folder: Path) -> tuple[int, int]:
    """Return the number of steps of the first rank, and how many of them are to run other bucket plans."""
    from overlapscope.trace.event_log import read_latest_step

    ranks = find_recorded_ranks(find_latest_attempt(folder))
    latest = read_latest_step(ranks[0] / EVENTS_FILE) if ranks else None
    if latest is None:
        return 0, 0
    models = read_json(ranks[0] / RUN_FILE, []).get("models") or ()
    return latest, sum(int((model.get("probing") or {}).get("steps", 0)) for model in models)


def _end(child: subprocess.Popen[bytes], is_impatient: Callable[[], bool]) -> None:
    """End the command and all that it has started, if it has not ended by itself.

    Args:
        is_impatient: returns True once it is to end at once.
    """
    if child.poll() is None:
        started = [child.pid, *_find_descendants(child.pid)]
        _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_S
        while child.poll() is None and time.monotonic() < deadline and not is_impatient():
            time.sleep(0.1)
        if child.poll() is None:
            for pid in started:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    _signal_group(child.pid, signal.SIGKILL)  # what it has left behind
    child.wait()


def _signal_group(pid: int, number: int) -> None:
    with suppress(OSError):
        os.killpg(pid, number)


def _find_descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have; empty where the system doesn't say."""
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return [*children, *(each for child in children for each in _find_descendants(child))]


def _explain(attempt: Path, status: int, output: Path) -> str:
    """Say why a run has failed: as ``diagnose`` does if it knows, else by the last line that was printed."""
    from overlapscope.diagnosis.attempts import read_attempt

    with suppress(OverlapScopeError):
        verdict = read_attempt(attempt).verdict
        if verdict.is_fault and verdict.kind != "cannot tell":
            return verdict.sentence.removesuffix(".")
    how = f"was killed by signal {-status}" if status < 0 else f"failed with exit code {status}"
    printed = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return f"the training {how}" + (f", and printed last: {make_printable(printed[-1])}" if printed else "")
