"""What the watchdogs of a job have reported, as verdicts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapscope.diagnosis.evidence import CallSite
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.format import REPORTS_FILE


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of one rank."""

    rank: int
    time_ns: int
    """Host nanoseconds (CLOCK_MONOTONIC)."""
    verdict: Verdict
    message: str
    is_retracted: bool
    """The job went on: it was slow."""


def reports_in(folder: Path) -> list[Report]:
    """All reports in a recording, by time."""
    reports = []
    for file in folder.glob(f"rank_*/{REPORTS_FILE}"):
        rank = int(file.parent.name.removeprefix("rank_"))
        for line in file.read_text(encoding="utf-8").splitlines():
            content = json.loads(line)
            reports.append(
                Report(
                    rank=rank,
                    time_ns=content["time_ns"],
                    verdict=_verdict(content["verdict"]),
                    message=content["message"],
                    is_retracted=content["retracted_ns"] is not None,
                )
            )
    return sorted(reports, key=lambda report: report.time_ns)


def _verdict(content: dict[str, Any]) -> Verdict:
    """As far as it can be compared with the truth."""
    sites = {int(rank): CallSite(**site) for rank, site in (content["call_sites"] or {}).items() if site}
    return Verdict(
        kind=content["kind"],
        sentence=content["sentence"],
        blamed=tuple(content["blamed"]),
        step=content["step"],
        bucket=content["bucket"],
        parameters=tuple(content["parameters"]),
        call_sites=sites,
    )
