"""What has become of a recording since a page was opened: the page asks for it every two seconds, and shows it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from tornado.web import RequestHandler

from dashboards.place import RUN_ROUTE
from dashboards.runs import Runs
from overlapscope.diagnosis.rank_files import is_running
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.format import EVENTS_FILE
from overlapscope.trace.log import log_position, newest_step
from overlapscope.trace.reports import read_reports

_OLD_AFTER_S: Final = 1.0
"""However many pages ask, files are looked at once in this time."""
_GROWS_S: Final = 10.0
"""A log that has grown within this time is being written, perhaps on another host."""
_MOST_RECORDINGS: Final = 64


@dataclass(frozen=True, kw_only=True)
class News:
    """The state of a recording."""

    is_live: bool = False
    """Whether it is being recorded."""
    newest_step: int | None = None
    """The step that its first rank has reached."""
    report: str = ""
    """What a watchdog has reported last and not taken back, in a sentence."""


class Newsroom:
    """Knows the state of one recording.

    Args:
        folder: of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._news = News()
        self._looked_s = 0.0
        self._position: object = None
        self._grew_s = -_GROWS_S

    def newest(self) -> News:
        """The state, at most a second old; that of nothing if there is no recording."""
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
        log = next(iter(folders.values())) / EVENTS_FILE
        position = log_position(log)
        if self._position not in (None, position):
            self._grew_s = now_s
        self._position = position
        reports = [report for report in read_reports(folders) if report.retracted_ns is None]
        return News(
            is_live=is_running(self._folder) or now_s - self._grew_s < _GROWS_S,
            newest_step=newest_step(log),
            report=reports[-1].sentence if reports else "",
        )


def news_routes(runs: Runs) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """The addresses beside all pages at which they ask, for Bokeh's server."""
    rooms = lru_cache(maxsize=_MOST_RECORDINGS)(Newsroom)
    of_run = RUN_ROUTE.replace("{run:path}", "(?P<run>.+)")
    return [(f"{route}/news", _NewsHandler, {"runs": runs, "rooms": rooms}) for route in ("", of_run)]


class _NewsHandler(RequestHandler):
    def initialize(self, runs: Runs, rooms: Any) -> None:
        self._runs = runs
        self._rooms = rooms

    def get(self, run: str = "") -> None:
        try:
            path = (
                self._runs.path_of(unquote_to_bytes(run).decode(errors="surrogateescape")) if run else self._runs.alone
            )
        except OverlapScopeError:
            path = None
        self.set_header("Cache-Control", "no-store")
        self.write(asdict(News() if path is None else self._rooms(path).newest()))
