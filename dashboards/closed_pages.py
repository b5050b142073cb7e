"""What becomes of the memory of a page once it is closed, or left for another one."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

from bokeh.server.server import Server
from bokeh.server.views.ws import WSHandler
from tornado.ioloop import PeriodicCallback

LIFETIMES: Final[dict[str, Any]] = {
    # One that is on a slow line has time to open its websocket, and one whose line broke to open it again.
    "check_unused_sessions_milliseconds": 5_000,
    "unused_session_lifetime_milliseconds": 60_000,
}
"""Options of Bokeh's server."""

_GOING_AWAY: Final = 1001
"""What a browser says of a page that is closed or left, RFC 6455, 7.4.1; of a line that broke nothing is said."""
_GIVEN_BACK_MS: Final = 20_000


def forget_closed_pages(server: Server) -> None:
    """Give the memory of closed pages back soon.

    A page that follows a recording is opened again and again, and each has read a newer state of it.
    """
    for rule in server._tornado.wildcard_router.rules:
        if isinstance(rule.target, type) and issubclass(rule.target, WSHandler):
            # Panel has one of its own, made of Bokeh's.
            rule.target = type("WebSocket", (_ForgetsClosedPages, rule.target), {})
    if sys.platform == "linux":
        PeriodicCallback(_give_freed_memory_back, _GIVEN_BACK_MS).start()


class _ForgetsClosedPages(WSHandler):
    def on_close(self) -> None:
        if self.connection is not None and self.close_code == _GOING_AWAY:
            self.connection.session.request_expiration()
        super().on_close()


def _give_freed_memory_back() -> None:
    """To the system: glibc keeps most of what tables have filled. Other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
