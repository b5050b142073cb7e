"""Fault jobs: one real process per rank, watched until nothing more will happen, and ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal, Protocol

from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.stall_timeout import STUCK_AFTER_NS
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import TRACE_VARIABLE, add_startup_hook
from overlapscope.trace.process_files import read_reports
from overlapscope.trace.schema import ENDED_FILE, rank_folder

# The diagnosis of a recording from the laboratory, as in ``overlapscope diagnose``.


def diagnose(folder: Path) -> tuple[Verdict, str]:
    """Diagnose a recording and those of its processes that still exist; return the verdict and the report text."""
    try:
        evidence, _ = read_evidence(folder)
    except OverlapScopeError as error:  # no rank got far enough to record anything
        return Verdict(kind="cannot tell", sentence=str(error)), str(error)
    verdict = judge(evidence)
    return verdict, format_report(verdict, evidence)


Wrapper = Literal["instrumented", "torch"]

STOCK_TIMEOUT_S: Final = 20.0
"""Timeout of the process group when a fault runs without our tools: the default of half an hour is too long to wait."""
_TIME_LIMIT_S: Final = 100.0
_SILENCE_TIMEOUT_S: Final = 8.0
"""Silence after which a job counts as hanging. Watchdogs need less time than that."""
_SILENCE_TIMEOUT_AFTER_REPORTS_S: Final = STUCK_AFTER_NS / 1e9 + 0.5
"""Silence once all remaining ranks have reported: a diagnosis waits nearly as long before it calls them stuck."""
_POLL_INTERVAL_S: Final = 0.05

OnLine = Callable[[int, str], None]


class RankProcess(Protocol):
    """Process of a rank, with the interface of ``subprocess``."""

    pid: int
    stdout: IO[str] | None

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended the process; None while it runs."""

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""

    def wait(self) -> int:
        """Wait for the end of the process."""


Start = Callable[[Path, dict[str, str]], RankProcess]
"""Function that starts a script with an environment; its stdout and stderr are both read as ``stdout``."""


def start_python(script: Path, environment: dict[str, str]) -> RankProcess:
    """Start a new interpreter, as a launcher would."""
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@dataclass
class FaultJob:
    """Running job: its processes and their output."""

    processes: list[RankProcess]
    fault_times: Path
    trace: Path | None = None
    started_s: float = field(default_factory=time.monotonic)
    last_output_s: float = 0.0
    """Time at which a rank last printed something, or ended (``time.monotonic``)."""
    output: list[list[str]] = field(default_factory=list)
    """Lines of output by rank."""

    def fault_ns(self) -> int | None:
        """Return the time of the first fault on any rank (CLOCK_MONOTONIC), or None before it happened."""
        times = [file.read_text() for file in self.fault_times.iterdir()]
        return min((int(text) for text in times if text), default=None)

    def running(self) -> tuple[int, ...]:
        """Return the ranks that have not ended."""
        return tuple(rank for rank, process in enumerate(self.processes) if process.poll() is None)

    def wait(self, patience_s: float = _SILENCE_TIMEOUT_S, time_limit_s: float = _TIME_LIMIT_S) -> None:
        """Wait until all ranks have ended, or the remaining ones have been silent since the fault.

        Args:
            patience_s: Silence to wait for, after the fault or after the last output or exit of a rank. Shorter once
                the remaining ranks have reported.
            time_limit_s: Limit of the total time.
        """
        deadline_s = self.started_s + time_limit_s
        left = self.running()
        while left and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)
            before, left = left, self.running()
            if left != before:
                self.last_output_s = time.monotonic()
            fault_ns = self.fault_ns()
            quiet_for_s = _SILENCE_TIMEOUT_AFTER_REPORTS_S if self._all_report_hang(left) else patience_s
            if fault_ns is not None and time.monotonic() > max(self.last_output_s, fault_ns / 1e9) + quiet_for_s:
                return

    def _all_report_hang(self, ranks: tuple[int, ...]) -> bool:
        """Return True if all of these have a standing report, and none is about to end, as on a busy machine."""
        folders = {rank: rank_folder(self.trace, rank) for rank in ranks if self.trace is not None}
        said = {report.rank for report in read_reports(folders) if report.retracted_ns is None}
        return (
            bool(folders)
            and said >= folders.keys()
            and not any((each / ENDED_FILE).exists() for each in folders.values())
        )

    def ends(self) -> list[str]:
        """Describe how each rank ended, or that it still runs."""
        return [_describe_exit(process.poll()) for process in self.processes]


@contextmanager
def run_fault_job(
    script: Path,
    world_size: int,
    *,
    wrapper: Wrapper = "instrumented",
    trace: Path | None = None,
    timeout_s: float | None = None,
    extra_environment: dict[str, str] | None = None,
    on_line: OnLine | None = None,
    start: Start = start_python,
) -> Iterator[FaultJob]:
    """Start a job, and kill what remains of it afterwards.

    Args:
        script: Script to run on each rank, as torchrun would start it.
        wrapper: Which DistributedDataParallel to use.
        trace: Folder to record into; None records nothing.
        timeout_s: Timeout of the process group; None for torch's default.
        extra_environment: Further environment variables of the ranks.
        on_line: Called with the rank and each line of output, on a thread.
        start: Function that starts a rank.
    """
    with tempfile.TemporaryDirectory(prefix="overlapscope-lab-") as temporary:
        fault_times = Path(temporary, "fault_times")
        fault_times.mkdir()
        if trace is not None:
            trace.mkdir(parents=True, exist_ok=True)
        environment = _environment(Path(temporary), wrapper, trace, timeout_s) | (extra_environment or {})
        job = FaultJob([], fault_times, trace)
        readers = []
        try:
            for rank in range(world_size):
                of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
                of_rank["LOCAL_WORLD_SIZE"] = str(world_size)
                process = start(script, environment | of_rank)
                job.processes.append(process)
                job.output.append([])
                reader = threading.Thread(target=_collect_output, args=(job, rank, on_line), daemon=True)
                reader.start()
                readers.append(reader)
            yield job
        finally:
            for process in job.processes:
                process.kill()
            for process in job.processes:
                process.wait()
            for reader in readers:
                reader.join(timeout=5)


def _environment(temporary: Path, wrapper: Wrapper, trace: Path | None, timeout_s: float | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAPSCOPE_")}
    environment = inherited | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",  # more threads than cores would only compete
        "PYTHONUNBUFFERED": "1",
        "OVERLAPSCOPE_LAB_RENDEZVOUS": str(temporary / "rendezvous"),
        "OVERLAPSCOPE_LAB_FAULT_TIMES": str(temporary / "fault_times"),
        "OVERLAPSCOPE_LAB_DDP": wrapper,
    }
    if timeout_s is not None:
        environment["OVERLAPSCOPE_LAB_TIMEOUT_S"] = str(timeout_s)
    if trace is not None:
        environment[TRACE_VARIABLE] = str(trace.absolute())
        return add_startup_hook(environment)
    return environment


def _collect_output(job: FaultJob, rank: int, on_line: OnLine | None) -> None:
    stream = job.processes[rank].stdout
    assert stream is not None
    for line in stream:
        text = line.rstrip("\n")
        job.output[rank].append(text)
        job.last_output_s = time.monotonic()
        if on_line is not None:
            on_line(rank, text)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "still alive"
    if code == 0:
        return "succeeded"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
