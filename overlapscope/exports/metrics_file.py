"""The metrics of one recording in a text file that is replaced, for the textfile collector of node_exporter."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from overlapscope.analysis.analysis import Analysis
from overlapscope.diagnosis.attempts import read_attempt
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.errors import OverlapScopeError
from overlapscope.exports.open_metrics import Sample, samples_of, samples_of_verdict, text_of
from overlapscope.trace.attempts import newest_attempt, recorded_ranks
from overlapscope.trace.log import live_records
from overlapscope.trace.reader import read_trace

_OF_ALL_RANKS: Final = ("overlapscope_fault", "overlapscope_verdict")


def metrics_text(traces: Path, *, is_live: bool) -> str:
    """What is known by now.

    Args:
        traces: the folder of a run; of a job that was started again, the newest attempt counts.
        is_live: it goes on: the newest steps are read, so that it takes as long after hours as after minutes.

    Raises:
        OverlapScopeError: nothing can be read, such as at the beginning.
    """
    attempt = newest_attempt(traces)
    only_newest = live_records(len(recorded_ranks(attempt))) if is_live else None
    samples = [Sample("overlapscope_live", int(is_live))]
    try:
        trace = read_trace(attempt, only_newest=only_newest)
    except OverlapScopeError:
        if is_live:
            raise
        judged = read_attempt(attempt)  # it may have ended before there was anything to record
        missing = set(judged.evidence.expected_ranks) - set(judged.evidence.ranks)
        samples += samples_of_verdict(judged.verdict)
    else:
        missing = set(trace.expected_ranks) - set(trace.ranks["rank"])
        samples += samples_of(Analysis(trace), Diagnosis.of(attempt))
    if missing:
        # Of a job on several hosts each has its own ranks only: whether all is well can't be known here.
        samples = [sample for sample in samples if sample.family not in _OF_ALL_RANKS]
    return text_of({traces.resolve().name: samples})


def replace_file(path: Path, text: str) -> None:
    """Write a file in place of what was there: whoever reads it finds the one or the other, whole.

    Raises:
        OverlapScopeError: it can't be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # the collector reads names that end in .prom
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise OverlapScopeError(f"{path}: can't be written ({error.strerror})") from None
