"""Metrics of runs as OpenMetrics text, which Prometheus and node_exporter read.

Names and suffixes follow prometheus.io/docs/practices/naming: seconds and ratios. Means are the same as on all pages;
an unknown value has no sample.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.analysis import Analysis
from overlapscope.diagnosis.attempts import read_attempt
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.event_log import live_record_limit
from overlapscope.trace.folders import find_latest_attempt, find_recorded_ranks
from overlapscope.trace.recording import read_trace

FAMILIES: Final = {
    "overlapscope_step_seconds": "Mean time of a step.",
    "overlapscope_block_seconds": "Mean time of a block of the breakdown of a step; the blocks sum to the step.",
    "overlapscope_exposed_seconds": "Mean exposed communication of a step, by what is waited for.",
    "overlapscope_hidden_seconds": "Mean communication of a step under which something else goes on.",
    "overlapscope_overlap_ratio": "Hidden over all communication.",
    "overlapscope_steps_counted": "Number of steady steps, which the means are taken over.",
    "overlapscope_latest_step": "Number of the newest step that a rank has finished.",
    "overlapscope_ranks": "How many ranks left a recording.",
    "overlapscope_ranks_expected": "How many ranks train together.",
    "overlapscope_straggler_saving_seconds": "What fixing late ranks, a slow link or long transfers would save.",
    "overlapscope_live": "1 while it is being recorded, else 0.",
    "overlapscope_incidents": "Reports of watchdogs that have not been withdrawn.",
    "overlapscope_fault": "1 if something is wrong with the job, 0 if not.",
    "overlapscope_verdict": "1 for what the diagnosis says of the job.",
}
"""Help text of each gauge, by its name."""

Labels = tuple[tuple[str, str], ...]
"""(name, value) of each label."""


@dataclass(frozen=True)
class Sample:
    """A value of a metric of one run."""

    family: str
    value: float
    labels: Labels = ()


def generate_samples(analysis: Analysis, diagnosis: Diagnosis | None) -> Iterator[Sample]:
    """Generate the samples of a run.

    Args:
        diagnosis: diagnosis of the run; None without collective logs, which leaves out the metrics of faults.
    """
    trace, summary = analysis.trace, analysis.summary
    yield Sample("overlapscope_ranks", len(trace.ranks))
    if trace.expected_ranks:
        yield Sample("overlapscope_ranks_expected", len(trace.expected_ranks))
    if len(trace.steps):
        yield Sample("overlapscope_latest_step", int(trace.steps["step"].max()))
    yield Sample("overlapscope_steps_counted", summary.steps)
    if summary.steps:
        yield Sample("overlapscope_step_seconds", summary.mean.step.value / 1e9)
        for name, mean in summary.mean.blocks.items():
            yield Sample("overlapscope_block_seconds", mean.value / 1e9, (("block", name),))
        for reason, mean in summary.exposed_for.items():
            yield Sample("overlapscope_exposed_seconds", mean.value / 1e9, (("reason", reason),))
        yield Sample("overlapscope_hidden_seconds", summary.hidden.value / 1e9)
        yield Sample("overlapscope_overlap_ratio", summary.overlap_ratio)
    for finding in analysis.stragglers.findings if analysis.stragglers is not None else ():
        link = "" if finding.link is None else f"{finding.link.rank} to {finding.link.peer_rank}"
        ranks = ",".join(map(str, finding.ranks))
        labels = (("cause", finding.cause), ("ranks", ranks), ("host", finding.host or ""), ("link", link))
        yield Sample("overlapscope_straggler_saving_seconds", finding.saving.step.value / 1e9, labels)
    if diagnosis is not None:
        yield Sample("overlapscope_incidents", sum(report.retracted_ns is None for report in diagnosis.reports))
        yield from generate_verdict_samples(diagnosis.verdict)


def generate_verdict_samples(verdict: Verdict) -> Iterator[Sample]:
    """Generate the samples of a job's verdict."""
    yield Sample("overlapscope_fault", int(verdict.is_fault))
    yield Sample("overlapscope_verdict", 1, (("kind", verdict.kind), ("certainty", verdict.certainty)))


def format_open_metrics(samples: Mapping[str, Sequence[Sample]]) -> str:
    """Format the samples of several runs as github.com/prometheus/OpenMetrics specifies.

    Args:
        samples: samples by name of their run.
    """
    labeled = [
        Sample(one.family, one.value, (("run", run), *one.labels)) for run, known in samples.items() for one in known
    ]
    return format_families(FAMILIES, labeled)


def format_families(families: Mapping[str, str], samples: Sequence[Sample]) -> str:
    """Format samples of gauges; those without a finite value are left out.

    Args:
        families: help text of each gauge, by its name.
    """
    lines = []
    for name, help_text in families.items():
        kept = [one for one in samples if one.family == name and math.isfinite(one.value)]
        if not kept:
            continue
        lines += [f"# TYPE {name} gauge", f"# HELP {name} {help_text}"]
        lines += [f"{name}{{{_labels(one.labels)}}} {one.value:.9g}" for one in kept]
    return "\n".join([*lines, "# EOF", ""])


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_WHOLE_JOB_FAMILIES: Final = ("overlapscope_fault", "overlapscope_verdict")


def compute_metrics_text(traces: Path, *, is_live: bool) -> str:
    """Compute the current metrics of a run as OpenMetrics text.

    Args:
        traces: folder of the run; of a restarted job, the last attempt is used.
        is_live: the run is still being recorded: only its last steps are read, so that the time does not grow with it.

    Raises:
        OverlapScopeError: nothing can be read, for example because nothing has been recorded yet.
    """
    attempt = find_latest_attempt(traces)
    latest_records = live_record_limit(len(find_recorded_ranks(attempt))) if is_live else None
    samples = [Sample("overlapscope_live", int(is_live))]
    try:
        trace = read_trace(attempt, latest_records=latest_records)
    except OverlapScopeError:
        if is_live:
            raise
        judged = read_attempt(attempt)  # the run may have ended before its first step
        missing = set(judged.evidence.expected_ranks) - set(judged.evidence.ranks)
        samples += generate_verdict_samples(judged.verdict)
    else:
        missing = set(trace.expected_ranks) - set(trace.ranks["rank"])
        diagnosis = Diagnosis.of(attempt)
        samples += generate_samples(Analysis(trace), diagnosis)
        if diagnosis is None and trace.steps.empty and not is_live:  # it has ended while ranks waited for others
            samples += generate_verdict_samples(read_attempt(attempt).verdict)
    if missing:
        # The folder may hold only the ranks of this host: whether the whole job is healthy can't be known here.
        samples = [sample for sample in samples if sample.family not in _WHOLE_JOB_FAMILIES]
    return format_open_metrics({traces.resolve().name: samples})


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    Raises:
        OverlapScopeError: it can't be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # the collector only reads files named *.prom
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise OverlapScopeError(f"{path}: can't be written ({error.strerror})") from None
