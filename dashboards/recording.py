"""The recording that the app shows: read once for all pages, and again when its files change."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import pandas as pd

from dashboards.forecast import Forecast, is_soon
from dashboards.newsroom import Newsroom
from overlapscope.analysis.analysis import Analysis
from overlapscope.analysis.clocks import clock_offsets
from overlapscope.analysis.heatmap import Heatmap
from overlapscope.analysis.lanes import LanesByRank
from overlapscope.analysis.rounds import Rounds
from overlapscope.analysis.stragglers import hosts_of
from overlapscope.diagnosis.attempts import Attempt, read_attempts
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.model.calibration import CALIBRATION_FILE
from overlapscope.model.curve import Options
from overlapscope.trace import store
from overlapscope.trace.attempts import attempts_beside, number_of
from overlapscope.trace.flight_recorder_files import holds_dumps
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.format import EVENTS_FILE, RECORD_BYTES
from overlapscope.trace.log import bytes_to_read, live_records
from overlapscope.trace.reader import Progress, Trace, empty_trace, read_trace

_OUTDATED_AFTER_S: Final = 2.0
_READING_SHARE: Final = 0.25
"""Of the time, at most, for reading what goes on again and again."""


class Snapshot(Analysis):
    """A recording as it was when it was read.

    Args:
        before: an earlier one, of a recording that goes on.
    """

    def __init__(self, trace: Trace, before: Snapshot | None = None) -> None:
        super().__init__(trace)
        self.is_live = False
        """Whether the job goes on, as far as its files show."""
        is_asked = before is not None and "forecast" in before.__dict__
        self._before: Snapshot | None = before if before is None or is_asked else before._before
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
            self.__dict__.pop("diagnosis", None)  # another thread may have been quicker

    def _forget_attempts(self) -> None:
        """Unless they are over and no other has begun."""
        judged: tuple[Attempt, ...] | None = self.__dict__.get("attempts")
        if judged is None:
            return
        newest = max((each.number for each in judged), default=0)
        is_old = time.monotonic() - self._attempts_judged_s > _OUTDATED_AFTER_S
        is_live = any(each.evidence.is_live for each in judged)
        if (is_live and is_old) or _newest_beside(self.trace.path) != newest:
            self.__dict__.pop("attempts", None)

    @cached_property
    def lanes(self) -> LanesByRank:
        """The lanes of the timeline, arranged per rank when a page first needs them."""
        return LanesByRank(self.trace)

    @cached_property
    def rounds(self) -> Rounds:
        """What its all-reduces are made of, if a strategy makes them of sends and receives."""
        return Rounds(self.trace)

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

    def forecast_by_now(self, options: Options) -> Snapshot | None:
        """The newest snapshot with a forecast for these options; None while the first is being made.

        That is this one or, of a recording that goes on, an earlier one: it is read again before a forecast is made.
        """
        earlier = None if self._before is None else self._before.forecast_by_now(options)
        if earlier is not self._before:
            return earlier  # the one before is in the making: one at a time, or all would be late
        if not is_soon(self.forecast, options):
            return earlier
        self._before = None
        return self


@dataclass(frozen=True, kw_only=True)
class _Reading:
    snapshot: Snapshot
    mark: str
    """What changes when the files do."""
    until_s: float
    """It is not done again before."""


class Recording:
    """A folder of traces. A run may still be writing to it: every page that is opened shows the newest state.

    Of a long one that goes on, that is the newest steps, so that memory and waiting stay the same however long it does.

    Args:
        folder: what ``overlapscope record -o`` wrote, or dumps of PyTorch's Flight Recorder, which have nothing but an
            order of collectives.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._newsroom = Newsroom(folder)
        self._whole: _Reading | None = None
        self._newest: _Reading | None = None

    def newest(self, progress: Progress | None = None, *, is_whole: bool = False) -> Snapshot:
        """The current snapshot of the folder.

        Args:
            progress: told of each rank that has been read, if any has to be.
            is_whole: with all steps, also of a long recording that goes on.

        Raises:
            OverlapScopeError: the folder holds nothing to show.
        """
        is_dumps, folders = self._is_dumps, self._folders()
        only_newest = None if is_dumps else self._only_newest(folders.values())
        is_part = only_newest is not None and not is_whole
        reading = self._newest if is_part else self._whole
        begun_s = time.monotonic()
        mark = reading.mark if reading is not None and begun_s < reading.until_s else self.state()
        if reading is None or mark != reading.mark:
            trace = (
                None if is_dumps else read_trace(self.folder, progress, only_newest=only_newest if is_part else None)
            )
            before = None if reading is None or not self._newsroom.newest().is_live else reading.snapshot
            snapshot = _of_dumps(self.folder) if trace is None else Snapshot(trace, before)
            now_s = time.monotonic()
            until_s = 0.0 if only_newest is None else now_s + (now_s - begun_s) / _READING_SHARE
            reading = _Reading(snapshot=snapshot, mark=mark, until_s=until_s)
        if not is_part:
            self._whole = reading
        else:
            self._newest = reading
            if self._whole is not None and begun_s > self._whole.until_s:
                self._whole = None  # large, and outdated: who asks for all steps again gets those of then
        reading.snapshot.is_live = self._newsroom.newest().is_live
        reading.snapshot.forget_outdated()
        return reading.snapshot

    def _only_newest(self, folders: Collection[Path]) -> int | None:
        """How many records to read of each rank; None for all."""
        if not self._newsroom.newest().is_live:
            self._newest = None
            return None
        count = live_records(len(folders))
        logged = sum(bytes_to_read(folder / EVENTS_FILE) for folder in folders)
        return count if logged > count * len(folders) * RECORD_BYTES else None

    def state(self) -> str:
        """What changes when anything does that is read.

        Raises:
            OverlapScopeError: the folder holds nothing to show.
        """
        return store.fingerprint(self._folders()) + _version_of(self.folder / CALIBRATION_FILE)

    def _folders(self) -> dict[int, Path]:
        return {0: self.folder} if self._is_dumps else find_rank_folders(self.folder)

    @property
    def _is_dumps(self) -> bool:
        return self.folder.is_dir() and holds_dumps(self.folder)


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
