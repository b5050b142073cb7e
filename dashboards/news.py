"""HTTP handler of ``/news``, which an open page polls every two seconds for the live status of its recording."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.web import RequestHandler, authenticated

from dashboards.newsroom import LiveStatus, RecordingStatus
from dashboards.place import RUN_ROUTE
from dashboards.runs import RunIndex
from overlapscope.errors import OverlapScopeError

_MOST_RECORDINGS: Final = 64


def live_status_routes(runs: RunIndex) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the routes of the live status, beside the pages of each run, for Bokeh's server."""
    statuses = lru_cache(maxsize=_MOST_RECORDINGS)(LiveStatus)
    of_run = RUN_ROUTE.replace("{run:path}", "(?P<run>.+)")
    return [(f"{route}/news", _LiveStatusHandler, {"runs": runs, "rooms": statuses}) for route in ("", of_run)]


class _LiveStatusHandler(AuthRequestHandler):
    def initialize(self, runs: RunIndex, statuses: Any) -> None:
        self._runs = runs
        self._statuses = statuses

    @authenticated
    def get(self, run: str = "") -> None:
        try:
            path = (
                self._runs.path_of(unquote_to_bytes(run).decode(errors="surrogateescape"))
                if run
                else self._runs.only_run
            )
        except OverlapScopeError:
            path = None
        self.set_header("Cache-Control", "no-store")
        self.write(asdict(RecordingStatus() if path is None else self._statuses(path).latest()))
