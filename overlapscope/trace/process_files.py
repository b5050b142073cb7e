"""What watchdogs and launchers write about a process: reports, stall snapshots, and exit records."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import Problem
from overlapscope.trace import clocks
from overlapscope.trace.folders import is_rank_folder_name, parse_unix_offset_ns
from overlapscope.trace.json_files import (
    dump_json_line,
    read_dataclass,
    read_dataclasses,
    read_json,
    read_lines,
    replace_text,
    write_json,
)
from overlapscope.trace.regular_file import open_regular_file
from overlapscope.trace.schema import JOINING_FILE, RANK_FILE, REPORTS_FILE, STALL_FILE

_MOST_STACK_BYTES: Final = 200_000
"""Maximum number of bytes read of a stacks file: nobody reads more, and a damaged file may have any size."""


def describe_process(folder: Path) -> dict[str, int]:
    """Return the fields that say which process wrote a file in a rank's folder: its PID, and the rank by the folder."""
    rank = {"rank": int(folder.name.removeprefix("rank_"))} if is_rank_folder_name(folder.name) else {}
    return rank | {"pid": os.getpid()}


def read_process(folder: Path) -> dict[str, Any]:
    """Return where the rank of a folder ran, ``rank.json``, or ``joining.json`` if that is lost or another rank's.

    Returns:
        An empty one without both.
    """
    named = {"rank": int(folder.name.removeprefix("rank_"))} if is_rank_folder_name(folder.name) else {}
    found = (read_json(folder / name, []) for name in (RANK_FILE, JOINING_FILE))
    return next((one for one in found if one and is_of_process(one, named)), {})


def is_of_process(content: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Return False if what a file in a rank's folder holds was written by another process.

    Args:
        where: the process that left the folder. What is not known of it is taken to be the same.
    """
    return all(content.get(name) in (None, where.get(name)) or where.get(name) is None for name in ("rank", "pid"))


def make_foreign_file_problem(path: Path) -> Problem:
    """Return the problem that another process has written a file in a rank's folder."""
    return Problem("error", f"{path}: written by another process than the one that left this folder; it is left out")


@dataclass(frozen=True, kw_only=True)
class WatchdogReport:
    """One line of ``reports.jsonl``."""

    rank: int
    """Rank whose watchdog reports."""
    number: int
    time_ns: int
    unix_ns: int | None
    """Unix time of the report; None if the clock difference was not recorded."""
    step: int | None
    kind: str
    """Kind of the verdict."""
    sentence: str
    """One-sentence summary of what happened."""
    text: str
    """Full printed report: the summary, the ranks' last known positions, the collectives around them."""
    retracted_ns: int | None
    """Time when the watchdog saw that the job had continued after all; None if it did not."""
    verdict: Mapping[str, Any]
    """Complete verdict as ``overlapscope.diagnosis.verdict`` has written it; empty if it is lost."""
    stacks_path: Path

    @property
    def stacks(self) -> str:
        """Return the stacks of the rank's Python threads at that time; empty if they were not written."""
        try:
            with open_regular_file(self.stacks_path) as file:
                return file.read(_MOST_STACK_BYTES).decode(errors="replace")
        except OSError:
            return ""


class ReportLog:
    """Writer of the reports of one rank, with the Python stacks at that time.

    The file is rewritten with each report, because a report may be retracted.

    Args:
        folder: folder of the rank; reports that are already there are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = describe_process(folder)
        self._lines: list[dict[str, Any]] = read_lines(folder / REPORTS_FILE, [], lambda line: [dict(line)])

    def add(self, verdict: Mapping[str, Any], message: str, *, step: int, process_state: str) -> int:
        """Write a report, and the Python stacks of all threads.

        Returns:
            The number of the report, from 1.
        """
        number = len(self._lines) + 1
        self._lines.append(
            {
                "report": number,
                "time_ns": time.monotonic_ns(),
                "step": step,
                "process_state": process_state,
                **self._process,
                "verdict": verdict,
                "message": message,
                "retracted_ns": None,
            }
        )
        self._write()
        with suppress(OSError, RuntimeError), (self._folder / _stacks_file(number)).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return number

    def retract(self, number: int) -> None:
        """Mark a report as retracted: the job continues, so it was slow and not stuck."""
        self._lines[number - 1]["retracted_ns"] = time.monotonic_ns()
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            replace_text(self._folder / REPORTS_FILE, "".join(map(dump_json_line, self._lines)))


def read_reports(folders: Mapping[int, Path]) -> tuple[WatchdogReport, ...]:
    """Read the reports of all ranks, sorted by time, without damaged lines.

    Args:
        folders: rank folders by rank.
    """
    found = [report for rank, folder in folders.items() for report in read_rank_reports(rank, folder, [])]
    return tuple(sorted(found, key=lambda report: (report.time_ns, report.rank)))


def read_rank_reports(rank: int, folder: Path, problems: list[Problem]) -> list[WatchdogReport]:
    """Read the reports of one rank, in order."""
    if not (folder / REPORTS_FILE).exists():
        return []
    where = read_process(folder)
    to_unix_ns = parse_unix_offset_ns(where)
    rows = read_lines(
        folder / REPORTS_FILE,
        problems,
        lambda line: [(is_of_process(line, where), _parse_report(rank, folder, line, to_unix_ns))],
    )
    if not all(is_own for is_own, _ in rows):
        problems.append(make_foreign_file_problem(folder / REPORTS_FILE))
    return [report for is_own, report in rows if is_own]


def _parse_report(rank: int, folder: Path, line: dict[str, Any], to_unix_ns: int | None) -> WatchdogReport:
    number, time_ns = int(line["report"]), int(line["time_ns"])
    retracted_ns, step = line.get("retracted_ns"), line.get("step")
    verdict = dict(line.get("verdict") or {})
    return WatchdogReport(
        rank=rank,
        number=number,
        time_ns=time_ns,
        unix_ns=None if to_unix_ns is None else time_ns + to_unix_ns,
        step=None if step is None else int(step),
        kind=str(verdict.get("kind", "")),
        sentence=str(verdict.get("sentence") or line.get("message", "")),
        text=str(line.get("message", "")),
        retracted_ns=None if retracted_ns is None else int(retracted_ns),
        verdict=verdict,
        stacks_path=folder / _stacks_file(number),
    )


def _stacks_file(number: int) -> str:
    return f"stacks_{number}.txt"


@dataclass(frozen=True, kw_only=True)
class StallSnapshot:
    """State of a rank when its watchdog last examined it during a stall, ``stall.json``.

    With it, a reader who examines a running job from outside, or a job that was aborted because it hung, knows what the
    rank's watchdog knew.
    """

    time_ns: int
    """Time of the snapshot in host nanoseconds."""
    longest_recovered_stall_ns: int
    """Longest earlier time without progress that was followed by progress."""
    cpu_share: float | None
    """CPU use as a share of one core, over about the last second; None without two samples."""
    is_working: bool | None
    """True if the process moved through its Python code, or read or wrote; None if unknown."""
    has_begun_next_iteration: bool | None
    """True if the user's loop was in its next iteration, for a rank between two steps; None if unknown."""
    stacks: str
    """Stacks of its Python threads, from faulthandler."""


def write_stall_snapshot(folder: Path, seen: StallSnapshot) -> None:
    """Write a snapshot, replacing the previous one.

    Raises:
        OSError: it can't be written.
    """
    write_json(folder / STALL_FILE, asdict(seen))


def read_stall_snapshot(folder: Path, problems: list[Problem]) -> StallSnapshot | None:
    """Read the last snapshot; None if the rank never stalled, or if the file is damaged.

    Args:
        problems: receives problems with the file.
    """
    return read_dataclass(StallSnapshot, folder / STALL_FILE, problems)


WATCHDOG_ABORT_STATUS: Final = 70
"""Exit status of a process that its watchdog ended because it did not react."""
EXITS_PATTERN: Final = "exits_*.jsonl"


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """End of a process, as its parent observed it: one line of ``exits_*.jsonl``.

    A launcher knows what a rank can't record itself: the signal that killed it, its exit status, and whether the
    launcher had signaled it to end before.
    """

    pid: int
    boot_id: str | None
    """Boot id of the host that it ran on."""
    status: int
    """Exit status; -N if signal N killed it."""
    time_ns: int
    """Time when the exit was noticed, on the host's clock."""
    signaled_at_ns: int | None
    """Time of the first signal from the parent process; None if it ended without one. For the recorded command: time of
    the first Ctrl-C or SIGTERM meant for it."""
    signal_received: int | None
    """Number of that signal; None if it ended without one."""
    is_command: bool
    """True if the process is the recorded command and not a rank."""
    rank: int | None = None
    """Rank that its parent has given it, by the variable ``RANK``; None if unknown."""
    is_of_multiprocessing: bool = False
    """True if ``multiprocessing`` has started it, as ``torch.multiprocessing.spawn`` does."""


def write_exit(
    folder: Path,
    pid: int,
    status: int,
    *,
    signaled_at_ns: int | None = None,
    signal_received: int | None = None,
    is_command: bool = False,
    rank: int | None = None,
    is_of_multiprocessing: bool = False,
) -> None:
    """Append a record to the file of this process.

    Raises:
        OSError: it can't be written.
    """
    found = ProcessExit(
        pid=pid,
        boot_id=clocks.get_boot_id(),
        status=status,
        time_ns=clocks.host_now_ns(),
        signaled_at_ns=signaled_at_ns,
        signal_received=signal_received,
        is_command=is_command,
        rank=rank,
        is_of_multiprocessing=is_of_multiprocessing,
    )
    with (folder / f"exits_{socket.gethostname()}_{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(dump_json_line(asdict(found)))


def read_exits(folder: Path, problems: list[Problem]) -> list[ProcessExit]:
    """Read the exit records of all processes, in no particular order."""
    paths = sorted(folder.glob(EXITS_PATTERN))
    return [found for path in paths for found in read_dataclasses(ProcessExit, path, problems)]
