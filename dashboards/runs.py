"""Index of the served runs: found, read and analyzed in the background, so that a table of hundreds opens at once."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from dashboards.comparisons import ComparisonCache
from dashboards.recording import RecordingCache, Snapshot
from dashboards.run_facts import RunFacts, StepTimes, read_run_facts
from overlapscope.breakdown.trend import trend_by_step
from overlapscope.diagnosis.rank_state import is_running
from overlapscope.errors import OverlapScopeError
from overlapscope.fleet.run_figures import RunFigures, compute_run_figures
from overlapscope.interop.open_metrics import Sample, generate_samples
from overlapscope.trace.event_log import read_latest_records
from overlapscope.trace.folders import find_recorded_ranks, has_finished_recording
from overlapscope.trace.runs import (
    NOTES_FILE,
    FoundRun,
    FoundRuns,
    RunNotes,
    find_runs,
    is_run,
    read_notes,
    write_notes,
)
from overlapscope.trace.schema import EVENTS_FILE, TABLES_FOLDER

# Summary of a run, computed from its recording, for its row in the table of runs.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSummary(RunFigures):
    """Figures of a run, and what else the table and Prometheus show of it."""

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
        found = _summarize(RecordingCache(path).latest())
    except OverlapScopeError as error:
        found = RunSummary(line=str(error), is_fault=True)
    except Exception as error:  # an unforeseen recording must not stop the analysis of others
        _log.exception("%s can't be judged", path)
        found = RunSummary(line=f"can't be judged: {error!r}", is_fault=True)
    return replace(found, duration_s=time.monotonic() - began_s)


def _summarize(snapshot: Snapshot) -> RunSummary:
    diagnosis = snapshot.diagnosis
    return RunSummary(
        **vars(compute_run_figures(snapshot, diagnosis)),
        times=_summarize_step_times(snapshot) if len(snapshot.trace.steps) else None,
        samples=tuple(generate_samples(snapshot, diagnosis)),
    )


def _summarize_step_times(snapshot: Snapshot) -> StepTimes:
    trend = trend_by_step(snapshot.summary.finished_together, "step_time_ns")
    return StepTimes.of(int(trend["step"].iloc[0]), int(trend["last_step"].iloc[-1]), trend["mean"].to_numpy())


_SCAN_INTERVAL_S: Final = 2.0
"""Minimum seconds between two scans of the folders, which requests trigger."""
_MAX_SCAN_SHARE: Final = 0.1
"""Maximum share of one core's time that is spent on scans."""
_FIRST_SCAN_WAIT_S: Final = 1.0
"""Seconds for which the first page waits for the first scan."""
_MAX_SUMMARY_SHARE: Final = 0.05
"""Maximum share of one core's time that is spent on analyzing a live run again and again."""
_MIN_SUMMARY_INTERVAL_S: Final = 4.0
_MAX_PAUSE_S: Final = 60.0
"""Seconds after its last growth for which a log counts as live; slow steps take that long."""
_MAX_OPEN_RECORDINGS: Final = 4
"""Number of recordings that are kept in memory for their pages."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A row of the table of runs, as far as it is known."""

    run: FoundRun
    facts: RunFacts
    is_live: bool
    """True if one of its processes runs on this host, or its log has grown recently, as from another host."""
    judged: RunSummary | None = None
    """Summary of the run; None until it is computed."""
    notes: RunNotes = field(default_factory=RunNotes)
    notes_problem: str = ""
    """Why the notes can't be read; empty if they can."""

    @property
    def is_incident(self) -> bool:
        """Return whether the run has an incident; a verdict of "can't tell" is none while the run is live."""
        is_going_on = self.is_live and self.judged is not None and not self.judged.has_enough_evidence
        return self.judged is not None and self.judged.is_incident and not is_going_on


@dataclass(frozen=True, kw_only=True)
class _ScannedState:
    """State of a run at the last scan."""

    fingerprint: object
    """Fingerprint of the recording."""
    facts: RunFacts
    position: int
    """Sequence number of the last record of its first rank; 0 if that has none or has ended."""
    last_growth_s: float
    """Time (``time.monotonic``) at which ``position`` was last seen to have changed."""


@dataclass(frozen=True, kw_only=True)
class _SummaryJob:
    """A pending or finished analysis of a run."""

    result: Future[RunSummary]
    fingerprint: object
    """Fingerprint of the recording that is analyzed."""
    requested_s: float
    """Time (``time.monotonic``) of the request."""
    before: RunSummary | None
    """Previous result, which is used until this one is ready."""

    @property
    def known(self) -> RunSummary | None:
        """Return the latest result so far."""
        return self.result.result() if self.result.done() else self.before


class RunIndex:
    """The runs in the served folders: a request returns the state of the last scan, and starts another.

    Args:
        folders: each a folder of runs or a run itself; it need not exist yet.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.recording = lru_cache(maxsize=_MAX_OPEN_RECORDINGS)(RecordingCache)
        """Cached constructor of the recording in a folder."""
        self.comparisons = ComparisonCache(self.recording)
        self.found = FoundRuns()
        self._rows: tuple[RunRow, ...] = ()
        self._summary_jobs: dict[Path, _SummaryJob] = {}
        self._scanned: dict[Path, _ScannedState] = {}
        self._scan_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="looker")
        self._summary_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._current_scan: Future[None] | None = None
        self._next_scan_s = 0.0

    @property
    def only_run(self) -> Path | None:
        """Return the folder if it is the only one given and itself a run, so that its pages are shown and no table."""
        return self.folders[0] if len(self.folders) == 1 and is_run(self.folders[0]) else None

    def path_of(self, name: str) -> Path:
        """Return the folder of a run or of one of its attempts; an unknown name causes a scan for new runs.

        Raises:
            OverlapScopeError: there is no run of this name.
        """
        path = self.found.path_of(name)
        if path is None:
            self.found = find_runs(self.folders)
            path = self.found.path_of(name)
        if path is None:
            raise OverlapScopeError(f"there is no run of the name {name!r} in {', '.join(map(str, self.folders))}")
        return path

    def latest(self) -> tuple[RunRow, ...]:
        """Return the rows as of the last scan: incidents first, then live runs, then the others, latest first."""
        is_first = self._current_scan is None
        if self._current_scan is None or (self._current_scan.done() and time.monotonic() > self._next_scan_s):
            self._current_scan = self._scan_executor.submit(self._scan)
        if is_first:
            with suppress(TimeoutError):
                self._current_scan.result(_FIRST_SCAN_WAIT_S)
        asked = self._summary_jobs
        rows = (replace(row, judged=asked[row.run.latest].known) for row in self._rows if row.run.latest in asked)
        return tuple(sorted(rows, key=_sort_key))

    def close(self) -> None:
        """Cancel scans and analyzes that have not begun."""
        for pool in (self._scan_executor, self._summary_executor):
            pool.shutdown(cancel_futures=True)
        self.comparisons.close()

    @property
    def is_found(self) -> bool:
        """Return whether the first scan is complete."""
        return self._next_scan_s > 0

    def annotate(self, name: str, notes: RunNotes, seen: RunNotes) -> None:
        """Write the tags and the note of a run to its folder.

        Args:
            seen: notes on which the change is based.

        Raises:
            OverlapScopeError: they can't be written, or somebody else has changed them meanwhile.
        """
        run = next((each for each in self.found.runs if each.name == name), None)
        if run is None:
            raise OverlapScopeError(f"there is no run of the name {name!r} here any more")
        if read_notes(run.path) != seen:
            raise OverlapScopeError("somebody else has changed them meanwhile; close this and look at theirs first")
        write_notes(run.path, notes)
        self._rows = tuple(replace(row, notes=notes) if row.run.name == name else row for row in self._rows)

    def _scan(self) -> None:
        began_s = time.monotonic()
        try:
            self.found = find_runs(self.folders)
            rows = [self._row(run) for run in self.found.runs]
            self._scanned = {row.run.latest: self._scanned[row.run.latest] for row in rows}
            self._summary_jobs = {row.run.latest: self._summary_job(row) for row in sorted(rows, key=_sort_key)}
            self._rows = tuple(rows)
        except Exception:
            _log.exception("looking for runs failed")
        finally:
            now_s = time.monotonic()
            self._next_scan_s = now_s + max(_SCAN_INTERVAL_S, (now_s - began_s) / _MAX_SCAN_SHARE)

    def _row(self, run: FoundRun) -> RunRow:
        path, now_s = run.latest, time.monotonic()
        known, position, is_here = self._scanned.get(path), _last_sequence(path), is_running(path)
        fingerprint = (is_here, position, _fingerprint(path))
        last_growth_s = -math.inf if known is None else known.last_growth_s if known.position == position else now_s
        facts = known.facts if known is not None and known.fingerprint == fingerprint else _facts_of(path)
        self._scanned[path] = _ScannedState(
            fingerprint=fingerprint, facts=facts, position=position, last_growth_s=last_growth_s
        )
        try:
            notes, problem = read_notes(run.path), ""
        except OverlapScopeError as error:
            notes, problem = RunNotes(), str(error)
        return RunRow(
            run=run,
            facts=facts,
            is_live=is_here or (position > 0 and now_s - last_growth_s < _MAX_PAUSE_S),
            notes=notes,
            notes_problem=problem,
        )

    def _summary_job(self, row: RunRow) -> _SummaryJob:
        """Return the latest analysis, or start one if the run has changed, or is live and the last one is old."""
        path, now_s = row.run.latest, time.monotonic()
        known, fingerprint = self._summary_jobs.get(path), self._scanned[path].fingerprint
        if known is not None:
            if not known.result.done():
                return known
            rest_s = max(_MIN_SUMMARY_INTERVAL_S, known.result.result().duration_s / _MAX_SUMMARY_SHARE)
            is_old = now_s - known.requested_s > rest_s if row.is_live else fingerprint != known.fingerprint
            if not is_old:
                return known
        result = self._summary_executor.submit(summarize_run, path)
        return _SummaryJob(
            result=result, fingerprint=fingerprint, requested_s=now_s, before=None if known is None else known.known
        )


def _sort_key(row: RunRow) -> tuple[bool, bool, int, str]:
    return not row.is_incident, not row.is_live, -(row.facts.started_unix_ns or 0), row.run.name


def _facts_of(path: Path) -> RunFacts:
    try:
        return read_run_facts(path)
    except Exception:  # an unforeseen recording must not hide the others
        _log.exception("%s: what it is of can't be read", path)
        return RunFacts()


def _last_sequence(path: Path) -> int:
    """Return the sequence number of the last record of the first rank; 0 if it has none or has ended."""
    first = min(find_recorded_ranks(path), default=None)
    if first is None or has_finished_recording(first):
        return 0
    latest = read_latest_records(first / EVENTS_FILE, 1)
    return int(latest["sequence"][0]) if len(latest) else 0


def _fingerprint(path: Path) -> object:
    """Return a fingerprint of a recording that is not live, cheap enough for hundreds of them."""
    ours = (TABLES_FOLDER, NOTES_FILE)
    try:
        with os.scandir(path) as entries:
            kept = (entry for entry in entries if entry.name not in ours and not entry.name.startswith("."))
            return {entry.name: entry.stat().st_mtime_ns for entry in kept}
    except OSError as error:
        return error.strerror
