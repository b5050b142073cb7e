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
from overlapscope.trace.log import newest_records
from overlapscope.trace.reports import read_reports

_OLD_AFTER_S: Final = 1.0
"""Seconds for which a status is cached, so that many pages don't mean many file accesses."""
_GROWS_S: Final = 10.0
"""Seconds after its last growth for which a log counts as being written, perhaps on another host."""
_A_FEW: Final = 16


@dataclass(frozen=True, kw_only=True)
class News:
    """The live status of a recording."""

    is_live: bool = False
    """True if it is being recorded."""
    newest_step: int | None = None
    """Last step that its first rank has reached."""
    age_s: float | None = None
    """Seconds since the last record of that rank; None for a job that has ended or runs on another host."""
    report: str = ""
    """Sentence of the last report of a watchdog that has not been retracted."""


class Newsroom:
    """Cached live status of one recording.

    Args:
        folder: folder of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._news = News()
        self._looked_s = 0.0
        self._newest: int | None = None
        self._grew_s = -_GROWS_S

    def newest(self) -> News:
        """Return the status, at most a second old; an empty one if there is no recording."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _OLD_AFTER_S:
            self._looked_s = now_s
            try:
                self._news = self._look(now_s)
            except (OSError, OverlapScopeError):
                self._news = News()
        return self._news

    def _look(self, now_s: float) -> News:
        folders = find_rank_folders(self._folder)
        records = newest_records(next(iter(folders.values())) / EVENTS_FILE, _A_FEW)
        newest = int(records["sequence"][-1]) if len(records) else 0
        if self._newest not in (None, newest):
            self._grew_s = now_s
        self._newest = newest
        is_here = is_running(self._folder)
        reports = [report for report in read_reports(folders) if report.retracted_ns is None]
        return News(
            is_live=is_here or now_s - self._grew_s < _GROWS_S,
            newest_step=int(records["step"][-1]) if len(records) else None,
            age_s=max(0.0, (host_now_ns() - int(records["end_ns"][-1])) / 1e9) if is_here and len(records) else None,
            report=reports[-1].sentence if reports else "",
        )
