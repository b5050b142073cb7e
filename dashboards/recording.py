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

import pandas as pd

from dashboards.forecast import Forecast, is_forecast_ready
from dashboards.newsroom import LiveStatus
from overlapscope.analysis.analysis import Analysis
from overlapscope.analysis.clocks import clock_offsets
from overlapscope.analysis.heatmap import Heatmap
from overlapscope.analysis.lanes import LaneCache
from overlapscope.analysis.rounds import Rounds
from overlapscope.analysis.stragglers import get_hosts
from overlapscope.diagnosis.attempts import Attempt, read_attempts
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.model.calibration import CALIBRATION_FILE
from overlapscope.model.curve import Options
from overlapscope.trace import store
from overlapscope.trace.attempts import attempt_number, find_sibling_attempts
from overlapscope.trace.flight_recorder_files import holds_dumps
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.format import EVENTS_FILE, RECORD_BYTES
from overlapscope.trace.log import count_record_bytes, live_record_limit
from overlapscope.trace.memory import estimate_memory, free_bytes
from overlapscope.trace.reader import Progress, Trace, empty_trace, read_trace
from overlapscope.trace.table_file import ALL_STEPS, StepRange

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
        """Diagnose faults from the order of collectives; None without collective logs."""
        self._diagnosed_s = time.monotonic()
        return Diagnosis.of(self.trace.path, clock_offsets(self.trace))

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
    def rank_means(self) -> pd.DataFrame:
        """Return the means of each rank, from ``Summary.means_by_rank``."""
        return self.summary.means_by_rank()

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


@dataclass(frozen=True, kw_only=True)
class _CachedSnapshot:
    snapshot: Snapshot
    file_state: str
    """Fingerprint of the files that were read."""
    until_s: float
    """Time (``time.monotonic``) before which the files are not read again."""


class Recording:
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
            return self._newest(which, progress)

    def _newest(self, which: StepSelection | None, progress: Progress | None) -> Snapshot:
        is_dumps, folders = self._is_dumps, self._folders()
        is_live = self._live_status.latest().is_live
        is_long = is_live and not is_dumps and _is_long(folders.values())
        if is_dumps or which == ALL_STEPS:
            which = "all"
        elif which is None:
            which = "latest" if is_long or not (is_live or self.fits) else "all"
        self._evict_before(which, is_live=is_live)
        reading = self._snapshots.get(which)
        begun_s = time.monotonic()
        file_state = reading.file_state if reading is not None and begun_s < reading.until_s else self.state()
        if reading is None or file_state != reading.file_state:
            before = None if reading is None or not is_live else reading.snapshot
            self._snapshots.pop(which, None)  # so that an outdated snapshot doesn't stay if reading fails
            snapshot = _snapshot_of_dumps(self.folder) if is_dumps else Snapshot(self._read(which, progress), before)
            now_s = time.monotonic()
            until_s = now_s + (now_s - begun_s) / _READING_SHARE if is_long else 0.0
            reading = self._snapshots[which] = _CachedSnapshot(
                snapshot=snapshot, file_state=file_state, until_s=until_s
            )
        reading.snapshot.is_live = self._live_status.latest().is_live
        reading.snapshot.drop_outdated()
        return reading.snapshot

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
        return store.compute_fingerprint(self._folders()) + _version_of(self.folder / CALIBRATION_FILE)

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
