"""Release of the memory of pages that are closed, or left for another one."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

from bokeh.server.server import Server
from bokeh.server.views.ws import WSHandler
from tornado.ioloop import PeriodicCallback

SESSION_LIFETIME_OPTIONS: Final[dict[str, Any]] = {
    # Long enough for a page on a slow connection to open its websocket, or to open it again after an interruption.
    "check_unused_sessions_milliseconds": 5_000,
    "unused_session_lifetime_milliseconds": 60_000,
}
"""Options of Bokeh's server for the lifetime of sessions."""

_GOING_AWAY: Final = 1001
"""Websocket close code of a page that is closed or left (RFC 6455, 7.4.1); a broken connection sends none."""
_TRIM_INTERVAL_MS: Final = 20_000


def release_closed_pages(server: Server) -> None:
    """Release the memory of closed pages soon.

    Otherwise it grows: a page that follows a live recording is reloaded again and again, each time with a later state.
    """
    for rule in server._tornado.wildcard_router.rules:
        if isinstance(rule.target, type) and issubclass(rule.target, WSHandler):
            # The class is Panel's, a subclass of Bokeh's.
            rule.target = type("WebSocket", (_ExpiringWSHandler, rule.target), {})
    if sys.platform == "linux":
        PeriodicCallback(_trim_heap, _TRIM_INTERVAL_MS).start()


class _ExpiringWSHandler(WSHandler):
    def on_close(self) -> None:
        if self.connection is not None and self.close_code == _GOING_AWAY:
            self.connection.session.request_expiration()
        super().on_close()


def _trim_heap() -> None:
    """Return freed memory to the system: glibc keeps most of what tables used. Other C libraries lack this call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
