"""Watchdog reports as the Order page lists them: each report once, whichever rank made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from overlapscope.diagnosis.wording import capitalize, rank_list
from overlapscope.trace.reports import WatchdogReport
from overlapscope.units import format_ns

_MAX_REPORTS: Final = 12
_MAX_STACKS: Final = 8


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One report."""

    when: str
    sentence: str
    text: str
    """The printed report in full; empty if it was only the sentence."""
    retracted: str
    """Note that the report was withdrawn; empty if it was not."""
    stacks: tuple[tuple[str, str], ...]
    """Title of each rank, and its stacks."""


def build_report_rows(
    reports: Sequence[WatchdogReport], blamed: Sequence[int], *, verdict_sentence: str = ""
) -> list[ReportRow]:
    """Return the reports in order of time.

    Args:
        reports: reports of all ranks.
        blamed: ranks whose stacks come first.
        verdict_sentence: already shown above the reports, so not repeated.
    """
    same: dict[str, list[WatchdogReport]] = {}
    for report in reports:
        same.setdefault(report.sentence, []).append(report)
    return [_build_report_row(equal, blamed, verdict_sentence) for equal in list(same.values())[:_MAX_REPORTS]]


def _build_report_row(reports: Sequence[WatchdogReport], blamed: Sequence[int], verdict_sentence: str) -> ReportRow:
    first = reports[0]
    parts = [capitalize(rank_list(report.rank for report in reports))]
    if first.unix_ns is not None:
        parts.insert(0, f"{datetime.fromtimestamp(first.unix_ns / 1e9):%H:%M:%S}")
    if first.step is not None:
        parts.append(f"step {first.step}")
    retracted_ns = [report.retracted_ns for report in reports]
    retracted = ""
    if all(ns is not None for ns in retracted_ns):
        after_ns = max(ns for ns in retracted_ns if ns is not None) - first.time_ns
        retracted = f"Withdrawn {format_ns(after_ns)} later: the job went on."
    by_interest = sorted(reports, key=lambda report: (report.rank not in blamed, report.rank))
    stacks = [(f"Rank {report.rank}", text) for report in by_interest[:_MAX_STACKS] if (text := report.stacks.strip())]
    return ReportRow(
        when=" · ".join(parts),
        sentence="The same as above, while the job ran." if first.sentence == verdict_sentence else first.sentence,
        text="" if first.text.strip() == first.sentence.strip() else first.text,
        retracted=retracted,
        stacks=tuple(stacks),
    )
