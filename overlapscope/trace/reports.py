"""What the watchdogs report while a job runs, and what Python is doing on each rank then: ``reports.jsonl``.

A rank's file is written anew with each report, because one may be taken back.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.trace.checksum import json_line
from overlapscope.trace.folders import read_json, read_lines
from overlapscope.trace.format import RANK_FILE, REPORTS_FILE
from overlapscope.trace.log import Problem

_MOST_STACK_BYTES: Final = 200_000
"""Most that is read of it: nobody reads more, and a damaged file may be of any size."""


@dataclass(frozen=True, kw_only=True)
class WatchdogReport:
    """One line of ``reports.jsonl``."""

    rank: int
    """The rank whose watchdog reports."""
    number: int
    time_ns: int
    unix_ns: int | None
    """The time of the report as Unix time; None if the difference was not recorded."""
    step: int | None
    kind: str
    """Kind of the verdict."""
    sentence: str
    """What happened, in a sentence."""
    text: str
    """The whole printed report: the sentence, where ranks stood, the collectives around."""
    retracted_ns: int | None
    """When the watchdog saw that it had gone on after all."""
    verdict: Mapping[str, Any]
    """All of it, as ``overlapscope.diagnosis.verdict`` has written it; empty if it is lost."""
    stacks_path: Path

    @property
    def stacks(self) -> str:
        """Python threads of the rank at that time; empty if they were not written."""
        try:
            with self.stacks_path.open("rb") as file:
                return file.read(_MOST_STACK_BYTES).decode(errors="replace")
        except OSError:
            return ""


class ReportLog:
    """Writes the reports of one rank.

    Args:
        folder: of the rank; reports that are there already stay.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[dict[str, Any]] = read_lines(folder / REPORTS_FILE, [], lambda line: [dict(line)])

    def add(self, verdict: Mapping[str, Any], message: str, *, step: int, process_state: str) -> int:
        """Write down what was found, and what Python is doing meanwhile.

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
        """The job goes on: what was called stuck was slow."""
        self._lines[number - 1]["retracted_ns"] = time.monotonic_ns()
        self._write()

    def _write(self) -> None:
        """Whoever reads meanwhile has all of it as it was."""
        path = self._folder / REPORTS_FILE
        part = path.with_suffix(".part")
        with suppress(OSError):
            part.write_text("".join(map(json_line, self._lines)), encoding="utf-8")
            part.replace(path)


def read_reports(folders: Mapping[int, Path]) -> tuple[WatchdogReport, ...]:
    """The reports of all ranks, by time. Damaged lines are left out.

    Args:
        folders: of the ranks.
    """
    found = [report for rank, folder in folders.items() for report in reports_of(rank, folder, [])]
    return tuple(sorted(found, key=lambda report: (report.time_ns, report.rank)))


def reports_of(rank: int, folder: Path, problems: list[Problem]) -> list[WatchdogReport]:
    """The reports of one rank, in order."""
    if not (folder / REPORTS_FILE).exists():
        return []
    to_unix_ns = _to_unix_ns(folder)
    return read_lines(folder / REPORTS_FILE, problems, lambda line: [_report(rank, folder, line, to_unix_ns)])


def _report(rank: int, folder: Path, line: dict[str, Any], to_unix_ns: int | None) -> WatchdogReport:
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


def _to_unix_ns(folder: Path) -> int | None:
    try:
        sample = read_json(folder / RANK_FILE, [])["clock_samples"][0]
        return int(sample["unix_ns"]) - int(sample["monotonic_ns"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None
