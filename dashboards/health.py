"""HTTP handler of ``/health``: whether the server answers, for containers that are restarted if theirs doesn't."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tornado.web import RequestHandler

from overlapscope import __version__

HEALTH_ROUTE: Final = "/health"
"""Answered to everybody, under any host name: probes know no password, and call a container by its address."""


def health_routes(folders: Sequence[Path]) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the route of ``/health`` for Bokeh's server.

    Args:
        folders: folders that are served.
    """
    return [(HEALTH_ROUTE, _HealthHandler, {"folders": folders})]


class _HealthHandler(RequestHandler):
    def initialize(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    async def get(self) -> None:
        """Answer with one line of JSON, and with 200 also if a folder can't be read: a restart would not help."""
        is_readable = await asyncio.to_thread(all, map(_is_readable, self._folders))  # a file system may not answer
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps({"version": __version__, "recordings_readable": is_readable}) + "\n")


def _is_readable(folder: Path) -> bool:
    try:
        next(iter(folder.iterdir()), None)
    except OSError:
        return False
    return True
