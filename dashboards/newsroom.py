"""Live status of a recording, without reading all of it: whether it is live, its last step, and watchdog reports."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.rank_files import is_running
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.format import EVENTS_FILE
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.log import read_latest_records
from overlapscope.trace.reports import read_reports

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
        records = read_latest_records(next(iter(folders.values())) / EVENTS_FILE, _READ_RECORDS)
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
            report=reports[-1].sentence if reports else "",
        )
