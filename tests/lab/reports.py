"""What the watchdogs of a job have reported, as verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.json_files import from_dict
from overlapscope.trace.process_files import read_reports


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """Verdict that the watchdog of one rank has reported."""

    rank: int
    time_ns: int
    """Host time in nanoseconds (CLOCK_MONOTONIC)."""
    verdict: Verdict
    message: str
    is_retracted: bool
    """True if the report was withdrawn because the job continued: it was only slow."""


def load_reports(folder: Path) -> list[JobReport]:
    """Read all reports in a recording, sorted by time."""
    folders = {int(one.name.removeprefix("rank_")): one for one in folder.glob("rank_*")}
    return [
        JobReport(
            rank=report.rank,
            time_ns=report.time_ns,
            verdict=from_dict(Verdict, dict(report.verdict)),
            message=report.text,
            is_retracted=report.retracted_ns is not None,
        )
        for report in read_reports(folders)
    ]
