"""Figures of one run, for tables of many: the page Runs and ``overlapscope fleet`` show the same ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import describe_summary
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.from_recording import read_order_and_evidence
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.process_files import read_reports
from overlapscope.trace.rank_folder import RankFolder
from overlapscope.trace.recording import Trace

NO_VERDICT: Final = "no verdict"
"""Kind of a run whose collectives were not recorded."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Facts of a run that take long to compute; figures as on the page Overview, the verdict as on the page Order."""

    kind: str = ""
    """Kind of the verdict, or ``NO_VERDICT``; empty if nothing can be read."""
    line: str
    """Verdict in one line; for a run without a fault, where its step time goes."""
    has_enough_evidence: bool = True
    """True if there is enough evidence for a verdict."""
    is_fault: bool = False
    """True if the verdict is a fault, or the recording can't be read."""
    is_incident: bool = False
    """True if the page Order should be shown first."""
    step_ns: float | None = None
    """Mean step time."""
    exposed_ns: float | None = None
    """Exposed communication of the mean step."""
    overlap_ratio: float | None = None
    """Hidden over all communication of the mean step; None without either."""
    steps: int | None = None
    """Number of steps that at least one rank has finished, since the first recorded one."""
    ranks: int | None = None
    """Number of ranks that left a recording."""


def diagnose_trace(trace: Trace) -> Diagnosis | None:
    """Diagnose a recording on the machine that it is on; None without collective logs of ranks that have joined."""
    found = Diagnosis.of(trace.path, trace.clock_offsets_ns)
    return _diagnose_joining(trace.path) if found is None else found


def compute_run_figures(analysis: Analysis, diagnosis: Diagnosis | None) -> RunFigures:
    """Compute the figures of a run.

    Args:
        diagnosis: diagnosis of the run; None without collective logs.
    """
    verdict = None if diagnosis is None else diagnosis.verdict
    reason = "" if verdict is not None else "No collective logs were recorded."
    line = reason if verdict is None else " ".join(verdict.sentence.split())
    has_steps = len(analysis.trace.steps) > 0
    if has_steps and (verdict is None or verdict.kind == "healthy"):
        # Why there is no verdict does not replace where the step time goes: it is said before it.
        line = f"{reason} {describe_summary(analysis.summary)}".strip()
    figures = RunFigures(
        kind=NO_VERDICT if verdict is None else verdict.kind,
        line=line,
        has_enough_evidence=verdict is not None and verdict.certainty != "can't tell",
        is_fault=verdict is not None and verdict.is_fault,
        is_incident=diagnosis is not None and diagnosis.is_incident,
        ranks=len(analysis.trace.ranks),
    )
    return _add_steps(figures, analysis) if has_steps else figures


def _add_steps(figures: RunFigures, analysis: Analysis) -> RunFigures:
    summary, trace = analysis.summary, analysis.trace
    mean = summary.mean if summary.steps else None
    first = int(trace.steps["step"].min()) if trace.extent == "all" else 0
    return replace(
        figures,
        step_ns=None if mean is None else mean.step.value,
        overlap_ratio=None if mean is None or math.isnan(summary.overlap_ratio) else summary.overlap_ratio,
        exposed_ns=None if mean is None else mean.blocks["exposed"].value,
        steps=int(trace.steps["step"].max()) - first + 1,
    )


def _diagnose_joining(path: Path) -> Diagnosis | None:
    """Diagnose a job whose ranks were still waiting for others to join; None if none was."""
    folders = find_rank_folders(path)
    if not any(RankFolder(folder).is_joining() for folder in folders.values()):
        return None
    return Diagnosis(*read_order_and_evidence(path), read_reports(folders))
