"""Runs a random training as a user would: recorded, and ended if it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.chaos.program import SCRIPT, Program
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.jobs import diagnose
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from tests.lab.reports import JobReport, load_reports

RECORDING: Final = "traces"
OUTPUT: Final = "output.txt"
_STARTS_WITHIN_S: Final = 240.0
_HANGS_FOR_S: Final = 22.0
"""A job that does nothing for so long hangs ..."""
_HANGS_AT_START_FOR_S: Final = 60.0
"""... or until it has done a few steps, as on a crowded machine processes take long to start ..."""
_STARTED_AFTER: Final = 60
"""Collectives of all ranks together."""
_SLOW_FOR_S: Final = 70.0
"""... but processes of a healthy one may take as long to end, on a crowded machine."""
_QUIET_AFTER_REPORTS_S: Final = 7.0
_SILENT: Final = ("batch skipped", "step behind", "not reduced", "swapped collectives", "replicas differ", "not finite")
"""A job goes on with these."""
_ENDS_WITHIN_S: Final = 8.0
_LOOK_EVERY_S: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a program, and what was said of it."""

    seconds: float
    exit_code: int | None
    """None if it had to be ended."""
    reports: tuple[JobReport, ...]
    """The watchdogs', those withdrawn included."""
    live: Verdict | None
    """The diagnosis before it was ended; None if it ended by itself."""
    final: Verdict


def run(program: Program, folder: Path) -> Outcome:
    """Run a program in a folder of its own, where the script, its output and the recording stay."""
    folder.mkdir(parents=True)
    (folder / SCRIPT).write_text(program.text, encoding="utf-8")
    started_s = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()", "record"),
                *("-o", RECORDING, "--on-incident", program.setting.on_incident, "--", *program.command),
            ],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = _wait(process, program, folder / RECORDING)
            live = None if exit_code is not None else diagnose(folder / RECORDING)[0]
            said = tuple(load_reports(folder / RECORDING))  # what ranks say of their end is not about the program
        finally:
            _end(process, signal.Signals[program.setting.end_signal])
    return Outcome(
        seconds=time.monotonic() - started_s,
        exit_code=exit_code,
        reports=said,
        live=live,
        final=diagnose(folder / RECORDING)[0],
    )


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAPSCOPE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    return inherited | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path, "PYTHONUNBUFFERED": "1"}


def _wait(process: subprocess.Popen[bytes], program: Program, recording: Path) -> int | None:
    """Wait for the end of a job: its exit code, or None if it hangs."""
    progress, patience_s, since_s = 0, _STARTS_WITHIN_S, time.monotonic()
    while time.monotonic() < since_s + patience_s:
        if (code := process.poll()) is not None:
            return code
        if not program.event.is_harmless and _hangs_and_says_so(recording):
            return None
        if (latest := _progress(recording)) > progress:
            progress, since_s = latest, time.monotonic()
            usual_s = _HANGS_AT_START_FOR_S if latest < _STARTED_AFTER else _HANGS_FOR_S
            patience_s = (_SLOW_FOR_S if program.event.is_harmless else usual_s) + program.event.extra_s
        time.sleep(_LOOK_EVERY_S)
    return None


def _progress(recording: Path) -> int:
    """Grows as long as the ranks do anything: how many collectives they have entered."""
    try:
        logs = open_collective_logs(find_rank_folders(recording))
    except OverlapScopeError:  # none has come so far
        return 0
    return sum(file.latest for files in logs.groups.values() for file in files.values())


def _hangs_and_says_so(recording: Path) -> bool:
    reports = [report for report in load_reports(recording) if not report.is_retracted]
    stalled = [report for report in reports if report.verdict.kind not in _SILENT]
    return bool(stalled) and time.monotonic() - max(report.time_ns for report in reports) / 1e9 > _QUIET_AFTER_REPORTS_S


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End a job as whoever runs it would: ask it, then kill what is left; ``record`` has the last word."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, left = psutil.wait_procs(children, timeout=_ENDS_WITHIN_S)
    for child in left:
        child.kill()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
