"""Summary of a run, computed from its recording, for its row in the table of runs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from dashboards.recording import Recording, Snapshot
from overlapscope.analysis.run_facts import StepTimes
from overlapscope.analysis.summary import Summary
from overlapscope.analysis.trend import trend_by_step
from overlapscope.diagnosis.wording import capitalize
from overlapscope.errors import OverlapScopeError
from overlapscope.exports.open_metrics import Sample, generate_samples

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Facts of a run that take long to compute; figures as on the page Overview, the verdict as on the page Order."""

    kind: str = ""
    """Kind of the verdict, as on the page Order; empty if nothing can be read."""
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
    steps: int | None = None
    """Number of steps that at least one rank has finished."""
    ranks: int | None = None
    """Number of ranks that left a recording."""
    times: StepTimes | None = None
    """Step times over the whole recording."""
    samples: tuple[Sample, ...] = ()
    """All metrics, for Prometheus."""
    duration_s: float = 0.0
    """Seconds that the computation took."""


def summarize_run(path: Path) -> RunSummary:
    """Analyze a recording or dumps; the result for one that can't be read has no verdict, and ``line`` says why."""
    began_s = time.monotonic()
    try:
        return _judged(Recording(path).latest(), began_s)
    except OverlapScopeError as error:
        line = str(error)
    except Exception as error:  # an unforeseen recording must not stop the analysis of others
        _log.exception("%s can't be judged", path)
        line = f"can't be judged: {error!r}"
    return RunSummary(line=line, is_fault=True, duration_s=time.monotonic() - began_s)


def _judged(snapshot: Snapshot, began_s: float) -> RunSummary:
    diagnosis, trace = snapshot.diagnosis, snapshot.trace
    summary = snapshot.summary if len(trace.steps) else None
    has_mean = summary is not None and bool(summary.steps)
    verdict = None if diagnosis is None else diagnosis.verdict
    kind, line = "Not judged", "It has no logs of collectives."
    if verdict is not None:
        kind, line = capitalize(verdict.kind), verdict.sentence
    if summary is not None and (verdict is None or verdict.kind == "healthy"):
        line = summary.sentence
    return RunSummary(
        kind=kind,
        line=" ".join(line.split()),
        has_enough_evidence=verdict is not None and verdict.certainty != "can't tell",
        is_fault=verdict is not None and verdict.is_fault,
        is_incident=diagnosis is not None and diagnosis.is_incident,
        step_ns=summary.mean.step.value if summary is not None and has_mean else None,
        exposed_ns=summary.mean.blocks["exposed"].value if summary is not None and has_mean else None,
        steps=None if summary is None else int(trace.steps["step"].max()) + 1,
        ranks=len(trace.ranks),
        times=None if summary is None else _times(summary),
        samples=tuple(generate_samples(snapshot, diagnosis)),
        duration_s=time.monotonic() - began_s,
    )


def _times(summary: Summary) -> StepTimes:
    trend = trend_by_step(summary.finished_together, "step_time_ns")
    return StepTimes.of(int(trend["step"].iloc[0]), int(trend["last_step"].iloc[-1]), trend["mean"].to_numpy())
