"""Cache of a recording for the app: read once for all pages, and again when its files change."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from dashboards.forecast import Forecast, is_forecast_ready
from dashboards.rank_map import Heatmap
from overlapscope.analysis import Analysis
from overlapscope.breakdown.lanes import LaneCache
from overlapscope.breakdown.spans import Int64Array
from overlapscope.bucket_model.prediction import Options
from overlapscope.diagnosis.attempts import Attempt, read_attempts
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.rank_state import is_running
from overlapscope.errors import OverlapScopeError
from overlapscope.fleet.run_figures import diagnose_trace
from overlapscope.report.report import Section
from overlapscope.report.summary import build_breakdown_section
from overlapscope.stragglers.stragglers import get_hosts
from overlapscope.trace import cache
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.collective_arrival import compute_arrival_ns
from overlapscope.trace.event_log import count_record_bytes, live_record_limit, read_latest_records
from overlapscope.trace.flight_recorder import holds_dumps
from overlapscope.trace.folders import attempt_number, find_rank_folders, find_sibling_attempts
from overlapscope.trace.process_files import read_reports
from overlapscope.trace.recording import Progress, Trace, empty_trace, read_trace
from overlapscope.trace.recording_modes import OFF, read_begun_modes
from overlapscope.trace.schema import CALIBRATION_FILE, EVENTS_FILE, RECORD_BYTES
from overlapscope.trace.table_file import ALL_STEPS, StepRange, estimate_memory, free_bytes

# Live status of a recording, without reading all of it: whether it is live, its last step, and watchdog reports.

_CACHED_S: Final = 1.0
"""Seconds for which a status is cached, so that many pages don't mean many file accesses."""
_MAX_PAUSE_S: Final = 10.0
"""Seconds after its last growth for which a log counts as being written, perhaps on another host."""
_READ_RECORDS: Final = 16


@dataclass(frozen=True, kw_only=True)
class RecordingStatus:
    """The live status of a recording."""

    is_live: bool = False
    """True if it is being recorded."""
    latest_step: int | None = None
    """Last step that its first rank has reached."""
    age_s: float | None = None
    """Seconds since the last record of that rank; None for a job that has ended or runs on another host."""
    off_since: int | None = None
    """First step that this rank does not record because recording is off; None if it is on."""
    report: str = ""
    """Sentence of the last report of a watchdog that has not been retracted."""


class LiveStatus:
    """Cached live status of one recording.

    Args:
        folder: folder of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status = RecordingStatus()
        self._read_at_s = 0.0
        self._last_sequence: int | None = None
        self._last_growth_s = -_MAX_PAUSE_S

    def latest(self) -> RecordingStatus:
        """Return the status, at most a second old; an empty one if there is no recording."""
        now_s = time.monotonic()
        if now_s - self._read_at_s >= _CACHED_S:
            self._read_at_s = now_s
            try:
                self._status = self._read_status(now_s)
            except (OSError, OverlapScopeError):
                self._status = RecordingStatus()
        return self._status

    def _read_status(self, now_s: float) -> RecordingStatus:
        folders = find_rank_folders(self._folder)
        first = next(iter(folders.values()))
        modes = read_begun_modes(first, [])
        records = read_latest_records(first / EVENTS_FILE, _READ_RECORDS)
        latest = int(records["sequence"][-1]) if len(records) else 0
        if self._last_sequence not in (None, latest):
            self._last_growth_s = now_s
        self._last_sequence = latest
        is_here = is_running(self._folder)
        reports = [report for report in read_reports(folders) if report.retracted_ns is None]
        return RecordingStatus(
            is_live=is_here or now_s - self._last_growth_s < _MAX_PAUSE_S,
            latest_step=int(records["step"][-1]) if len(records) else None,
            age_s=max(0.0, (host_now_ns() - int(records["end_ns"][-1])) / 1e9) if is_here and len(records) else None,
            off_since=modes[-1].step if modes and modes[-1].every == OFF else None,
            report=reports[-1].sentence if reports else "",
        )


# Rounds of sends and receives that strategies make all-reduces of, and the all-reduce that each belongs to.

_SAME: Final = ["rank", "model", "step", "bucket"]


class Rounds:
    """The rounds of a recording.

    Args:
        trace: Recording whose ``segments`` are the rounds.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.table = trace.segments.assign(row=_find_all_reduces(trace))
        """``trace.segments`` with ``row``, the row of the all-reduce in ``trace.collectives``; -1 if unknown."""
        self._order = self.table.sort_values(["rank", "start_ns"], kind="stable").index.to_numpy()
        sorted_ranks = self.table["rank"].to_numpy()[self._order]
        self._of_rank = {
            int(rank): self._order[slice(*np.searchsorted(sorted_ranks, [rank, rank + 1]))]
            for rank in np.unique(sorted_ranks)
        }
        self._longest_ns = int((self.table["end_ns"] - self.table["start_ns"]).max()) if len(self.table) else 0

    def in_view(self, rank: int, from_ns: int, to_ns: int) -> pd.DataFrame:
        """Return the rounds of a rank that overlap a time range of the common clock, by start."""
        places = self._of_rank.get(rank, np.empty(0, dtype=np.int64))
        starts_ns = self.table["start_ns"].to_numpy()[places]
        first, after = np.searchsorted(starts_ns, [from_ns - self._longest_ns, to_ns])
        near = self.table.iloc[places[first:after]]
        return near[(near["end_ns"] > from_ns) & (near["row"] >= 0)]

    def of(self, row: int) -> pd.DataFrame:
        """Return the rounds of an all-reduce on its own rank and on every rank with a known clock, by rank and start.

        Args:
            row: Its row in ``trace.collectives`` on one of the ranks.
        """
        collectives = self._trace.collectives
        own = collectives.iloc[row]
        is_same = (collectives["op"] == own["op"]) & collectives["rank"].isin([*self._trace.aligned_ranks, own["rank"]])
        for column in ("model", "step", "bucket"):
            is_same &= collectives[column] == own[column]
        rows = np.flatnonzero(is_same)
        turns = collectives.iloc[rows].groupby("rank").cumcount().to_numpy()
        rows = rows[turns == turns[rows == row]]
        return self.table[self.table["row"].isin(rows)].sort_values(["rank", "start_ns"], kind="stable")


def _find_all_reduces(trace: Trace) -> Int64Array:
    """Return the row of the all-reduce of each round; -1 if unknown.

    If a bucket is reduced several times in a step, that is the latest all-reduce entered before the round.
    """
    collectives = trace.collectives.assign(
        row=np.arange(len(trace.collectives)), entered_ns=compute_arrival_ns(trace.collectives)
    )
    entered = collectives[collectives["op"] == "all_reduce"][[*_SAME, "entered_ns", "row"]].sort_values("entered_ns")
    begun = trace.segments[[*_SAME, "start_ns"]].assign(place=np.arange(len(trace.segments))).sort_values("start_ns")
    found = pd.merge_asof(begun, entered, left_on="start_ns", right_on="entered_ns", by=_SAME)
    rows: npt.NDArray[np.int64] = np.full(len(begun), -1, dtype=np.int64)
    rows[found["place"]] = found["row"].fillna(-1)
    return rows


StepSelection = Literal["all", "latest"] | StepRange
"""Steps of a recording to read: all, the last ones of a long recording, or a range."""

_OUTDATED_AFTER_S: Final = 2.0
_READING_SHARE: Final = 0.25
"""Maximum share of the time that is spent reading a long, live recording again and again."""


class Snapshot(Analysis):
    """The analysis of a recording as it was when it was read.

    Args:
        before: the previous snapshot of a live recording.
    """

    def __init__(self, trace: Trace, before: Snapshot | None = None) -> None:
        super().__init__(trace)
        self.is_live = False
        """True if the job is running, as far as its files show."""
        is_asked = before is not None and "forecast" in before.__dict__
        self._before: Snapshot | None = before if before is None or is_asked else before._before
        self._diagnosed_s = 0.0
        self._attempts_judged_s = 0.0

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Diagnose faults from the order of collectives; None without collective logs of ranks that have joined."""
        self._diagnosed_s = time.monotonic()
        return diagnose_trace(self.trace)

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """Diagnose all attempts of a restarted job; empty for others."""
        self._attempts_judged_s = time.monotonic()
        return read_attempts(self.trace.path)

    def drop_outdated(self) -> None:
        """Drop results that may be outdated although no file has changed: a running job may hang by now."""
        self._drop_outdated_attempts()
        known: Diagnosis | None = self.__dict__.get("diagnosis")
        if known is not None and known.evidence.is_live and time.monotonic() - self._diagnosed_s > _OUTDATED_AFTER_S:
            self.__dict__.pop("diagnosis", None)  # another thread may have dropped it already

    def _drop_outdated_attempts(self) -> None:
        """Drop the cached attempts, unless all have ended and no further one has started."""
        diagnosed_attempts: tuple[Attempt, ...] | None = self.__dict__.get("attempts")
        if diagnosed_attempts is None:
            return
        latest = max((each.number for each in diagnosed_attempts), default=0)
        is_old = time.monotonic() - self._attempts_judged_s > _OUTDATED_AFTER_S
        is_live = any(each.evidence.is_live for each in diagnosed_attempts)
        if (is_live and is_old) or _last_attempt_number(self.trace.path) != latest:
            self.__dict__.pop("attempts", None)

    @cached_property
    def lanes(self) -> LaneCache:
        """Return the lanes of the timeline, arranged per rank when a page first needs them."""
        return LaneCache(self.trace)

    @cached_property
    def rounds(self) -> Rounds:
        """Return the rounds of all-reduces that a strategy implements by sends and receives."""
        return Rounds(self.trace)

    @cached_property
    def breakdown_section(self) -> Section:
        """Build the section on the mean step, which the head of several pages shows."""
        return build_breakdown_section(self.summary)

    @cached_property
    def heatmap(self) -> Heatmap | None:
        """Compute the heatmap of ranks and steps; None without cycles."""
        if self.cycles is None or self.stragglers is None:
            return None
        summary = self.summary
        return Heatmap(
            self.cycles, get_hosts(self.trace), summary.figures, self.stragglers.step_time_ns, summary.job_breakdown
        )

    @cached_property
    def forecast(self) -> Future[Forecast]:
        """Start the forecast for other buckets in the background when a page first needs it."""
        _ = self.summary, self.stragglers  # computed here, so that the two threads don't both do it
        return Forecast.soon(self)

    def latest_forecast(self, options: Options) -> Snapshot | None:
        """Return the latest snapshot with a forecast for these options; None while the first is being computed.

        It is this snapshot or, for a live recording, an earlier one, as each is replaced before its forecast is ready.
        """
        earlier = None if self._before is None else self._before.latest_forecast(options)
        if earlier is not self._before:
            return earlier  # that of the previous snapshot is being computed: one at a time, or all would be late
        if not is_forecast_ready(self.forecast, options):
            return earlier
        self._before = None
        return self


@dataclass(kw_only=True)
class _CachedSnapshot:
    snapshot: Snapshot
    file_state: str
    """Fingerprint of the files that were read."""
    until_s: float = 0.0
    """Time (``time.monotonic``) before which the files are not read again."""


class RecordingCache:
    """A folder of a recording, which may be live: every page that is opened shows its latest state.

    Only the last steps of a long, live recording are read, so that memory and time don't grow with it; likewise of a
    finished one that does not fit into memory.

    Args:
        folder: folder that ``overlapscope record -o`` wrote, or dumps of PyTorch's Flight Recorder, which have only
            the order of collectives.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._live_status = LiveStatus(folder)
        self._snapshots: dict[StepSelection, _CachedSnapshot] = {}
        self._lock = threading.RLock()  # concurrent callers wait, and get the same snapshot

    def latest(self, progress: Progress | None = None, *, which: StepSelection | None = None) -> Snapshot:
        """Return the current snapshot of the folder, read again if its files have changed.

        Args:
            progress: called for each rank that is read.
            which: steps to read; None for all, or the last ones if the recording is long and live, or doesn't fit.

        Raises:
            OverlapScopeError: the folder holds nothing to show, or more than fits into memory.
        """
        with self._lock:
            is_live = self._live_status.latest().is_live
            is_long = is_live and not self._is_dumps and _is_long(self._folders().values())
            selection = self._select_steps(which, is_live=is_live, is_long=is_long)
            self._evict_before(selection, is_live=is_live)
            cached, begun_s = self._snapshots.get(selection), time.monotonic()
            if cached is None or (begun_s >= cached.until_s and self.state() != cached.file_state):
                cached = self._read_again(selection, progress, cached.snapshot if cached and is_live else None)
                now_s = time.monotonic()
                cached.until_s = now_s + (now_s - begun_s) / _READING_SHARE if is_long else 0.0
            cached.snapshot.is_live = self._live_status.latest().is_live
            cached.snapshot.drop_outdated()
            return cached.snapshot

    def _select_steps(self, which: StepSelection | None, *, is_live: bool, is_long: bool) -> StepSelection:
        """Return the steps to read."""
        if self._is_dumps or which == ALL_STEPS:
            return "all"
        if which is None:
            return "latest" if is_long or not (is_live or self.fits) else "all"
        return which

    def _read_again(self, which: StepSelection, progress: Progress | None, before: Snapshot | None) -> _CachedSnapshot:
        self._snapshots.pop(which, None)  # so that an outdated snapshot doesn't stay if reading fails
        file_state = self.state()
        snapshot = _snapshot_of_dumps(self.folder) if self._is_dumps else Snapshot(self._read(which, progress), before)
        self._snapshots[which] = _CachedSnapshot(snapshot=snapshot, file_state=file_state)
        return self._snapshots[which]

    @property
    def fits(self) -> bool:
        """Return whether there is enough memory for all steps, or they are loaded already."""
        free = free_bytes()
        needed = estimate_memory(folder / EVENTS_FILE for folder in self._folders().values())
        return "all" in self._snapshots or free is None or needed <= free

    def _read(self, which: StepSelection, progress: Progress | None) -> Trace:
        if which == "latest":
            return read_trace(self.folder, progress, latest_records=live_record_limit(len(self._folders())))
        return read_trace(self.folder, progress, steps=ALL_STEPS if which == "all" else which)

    def _evict_before(self, which: StepSelection, *, is_live: bool) -> None:
        """Release the readings of other steps that are unlikely to be used again, before some steps are read."""
        now_s = time.monotonic()
        for kept, reading in list(self._snapshots.items()):
            if isinstance(which, tuple):
                is_done = isinstance(kept, tuple) and kept != which
            elif which == "latest":  # a reading of all steps of a live recording is soon outdated
                is_done = kept == "all" and now_s > reading.until_s
            else:
                is_done = kept == "latest" and not is_live
            if is_done:
                del self._snapshots[kept]

    def state(self) -> str:
        """Return a fingerprint of all files that are read.

        Raises:
            OverlapScopeError: the folder holds nothing to show.
        """
        return cache.compute_fingerprint(self._folders()) + _version_of(self.folder / CALIBRATION_FILE)

    def _folders(self) -> dict[int, Path]:
        return {0: self.folder} if self._is_dumps else find_rank_folders(self.folder)

    @property
    def _is_dumps(self) -> bool:
        return self.folder.is_dir() and holds_dumps(self.folder)


def _is_long(folders: Collection[Path]) -> bool:
    """Return whether the logs have more records than are read of a live recording."""
    logged = sum(count_record_bytes(folder / EVENTS_FILE) for folder in folders)
    return logged > live_record_limit(len(folders)) * len(folders) * RECORD_BYTES


def _last_attempt_number(path: Path) -> int:
    return max(map(attempt_number, find_sibling_attempts(path)), default=0)


def _version_of(file: Path) -> str:
    """Return a key that changes when the file is changed or created."""
    return str(file.stat().st_mtime_ns) if file.exists() else ""


def _snapshot_of_dumps(folder: Path) -> Snapshot:
    diagnosis = Diagnosis.of_dumps(folder)
    snapshot = Snapshot(empty_trace(folder, diagnosis.evidence.ranks))
    snapshot.diagnosis = diagnosis
    return snapshot
