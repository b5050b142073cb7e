"""The diagnosis of a recording from the laboratory, as ``overlapscope diagnose`` makes it."""

from __future__ import annotations

from pathlib import Path

from overlapscope.diagnosis.from_logs import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report import report_text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError


def diagnose(folder: Path) -> tuple[Verdict, str]:
    """The verdict on a folder, and on the processes that wrote it as far as they still exist; also as text."""
    try:
        evidence, _ = read_evidence(folder)
    except OverlapScopeError as error:  # no rank got as far as recording anything
        return Verdict(kind="cannot tell", sentence=str(error)), str(error)
    verdict = judge(evidence)
    return verdict, report_text(verdict, evidence)
