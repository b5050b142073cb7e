"""The diagnosis of a recording from the laboratory, as in ``overlapscope diagnose``."""

from __future__ import annotations

from pathlib import Path

from overlapscope.diagnosis.from_logs import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report import format_report
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError


def diagnose(folder: Path) -> tuple[Verdict, str]:
    """Diagnose a recording and those of its processes that still exist; return the verdict and the report text."""
    try:
        evidence, _ = read_evidence(folder)
    except OverlapScopeError as error:  # no rank got far enough to record anything
        return Verdict(kind="cannot tell", sentence=str(error)), str(error)
    verdict = judge(evidence)
    return verdict, format_report(verdict, evidence)
