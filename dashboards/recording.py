"""The recording that the app shows: read once for all pages, and again when its files change."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Final

import pandas as pd

from dashboards.forecast import Forecast
from overlapscope.analysis.analysis import Analysis
from overlapscope.analysis.clocks import clock_offsets
from overlapscope.analysis.heatmap import Heatmap
from overlapscope.analysis.lanes import LanesByRank
from overlapscope.analysis.stragglers import hosts_of
from overlapscope.diagnosis.attempts import Attempt, read_attempts
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.model.calibration import CALIBRATION_FILE
from overlapscope.trace import cache
from overlapscope.trace.attempts import attempts_beside, number_of
from overlapscope.trace.flight_recorder_files import holds_dumps
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.reader import Progress, Trace, empty_trace, read_trace

_OUTDATED_AFTER_S: Final = 2.0


class Snapshot(Analysis):
    """A recording as it was when it was read."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._diagnosed_s = 0.0
        self._attempts_judged_s = 0.0

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """What is wrong with it, and the order of its collectives; None without collective logs."""
        self._diagnosed_s = time.monotonic()
        return Diagnosis.of(self.trace.path, clock_offsets(self.trace))

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """All attempts of a job that was started again, judged; empty for others."""
        self._attempts_judged_s = time.monotonic()
        return read_attempts(self.trace.path)

    def forget_outdated(self) -> None:
        """Drop what is no longer true, although no file has changed: a job that runs may hang by now."""
        self._forget_attempts()
        known: Diagnosis | None = self.__dict__.get("diagnosis")
        if known is not None and known.evidence.is_live and time.monotonic() - self._diagnosed_s > _OUTDATED_AFTER_S:
            del self.diagnosis

    def _forget_attempts(self) -> None:
        """Unless they are over and no other has begun."""
        judged: tuple[Attempt, ...] | None = self.__dict__.get("attempts")
        if judged is None:
            return
        newest = max((each.number for each in judged), default=0)
        is_old = time.monotonic() - self._attempts_judged_s > _OUTDATED_AFTER_S
        is_live = any(each.evidence.is_live for each in judged)
        if (is_live and is_old) or _newest_beside(self.trace.path) != newest:
            del self.attempts

    @cached_property
    def lanes(self) -> LanesByRank:
        """The lanes of the timeline, arranged per rank when a page first needs them."""
        return LanesByRank(self.trace)

    @cached_property
    def rank_means(self) -> pd.DataFrame:
        """The means of each rank, from ``Summary.means_by_rank``."""
        return self.summary.means_by_rank()

    @cached_property
    def heatmap(self) -> Heatmap | None:
        """The map of ranks and steps; None without cycles."""
        if self.cycles is None or self.stragglers is None:
            return None
        summary = self.summary
        return Heatmap(
            self.cycles, hosts_of(self.trace), summary.figures, self.stragglers.step_time_ns, summary.job_account
        )

    @cached_property
    def forecast(self) -> Future[Forecast]:
        """The forecast for other buckets, made in the background from when a page first needs it."""
        _ = self.summary, self.stragglers  # computed here, so that the two threads don't do it both
        return Forecast.soon(self)


class Recording:
    """A folder of traces. A run may still be writing to it: every page that is opened shows the newest state.

    Args:
        folder: what ``overlapscope record -o`` wrote, or dumps of PyTorch's Flight Recorder, which have nothing but an
            order of collectives.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._snapshot: Snapshot | None = None
        self._fingerprint = ""

    def newest(self, progress: Progress | None = None) -> Snapshot:
        """The current snapshot of the folder.

        Args:
            progress: told of each rank that has been read, if any has to be.

        Raises:
            OverlapScopeError: the folder holds nothing to show.
        """
        is_dumps = self.folder.is_dir() and holds_dumps(self.folder)
        fingerprint = cache.fingerprint({0: self.folder} if is_dumps else find_rank_folders(self.folder))
        fingerprint += _version_of(self.folder / CALIBRATION_FILE)
        if self._snapshot is None or fingerprint != self._fingerprint:
            self._snapshot = _of_dumps(self.folder) if is_dumps else Snapshot(read_trace(self.folder, progress))
            self._fingerprint = fingerprint
        self._snapshot.forget_outdated()
        return self._snapshot


def _newest_beside(path: Path) -> int:
    return max(map(number_of, attempts_beside(path)), default=0)


def _version_of(file: Path) -> str:
    """A key that changes when the file does, also when it appears."""
    return str(file.stat().st_mtime_ns) if file.exists() else ""


def _of_dumps(folder: Path) -> Snapshot:
    diagnosis = Diagnosis.of_dumps(folder)
    snapshot = Snapshot(empty_trace(folder, diagnosis.evidence.ranks))
    snapshot.diagnosis = diagnosis
    return snapshot
