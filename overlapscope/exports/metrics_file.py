"""Metrics of one recording in a text file that is replaced atomically, for node_exporter's textfile collector."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from overlapscope.analysis.analysis import Analysis
from overlapscope.diagnosis.attempts import read_attempt
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.errors import OverlapScopeError
from overlapscope.exports.open_metrics import Sample, format_open_metrics, generate_samples, generate_verdict_samples
from overlapscope.trace.attempts import find_latest_attempt, find_recorded_ranks
from overlapscope.trace.log import live_record_limit
from overlapscope.trace.reader import read_trace

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
        samples += generate_samples(Analysis(trace), Diagnosis.of(attempt))
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
