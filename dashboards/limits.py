"""What a server takes from all its clients together, so that none can use up its memory or its file descriptors."""

from __future__ import annotations

import resource
from typing import Any, Final

from bokeh.server.contexts import ApplicationContext
from bokeh.server.server import Server
from bokeh.server.views.doc_handler import DocHandler
from bokeh.server.views.ws import WSHandler
from tornado.iostream import IOStream
from tornado.web import HTTPError, RequestHandler

from dashboards.pages.shell import render_standalone

MAX_PAGES: Final = 200
"""Pages that are open at a time, in all browsers. Each holds its plots in memory until a minute after it is closed."""
MAX_CONNECTIONS: Final = 1_000
"""Connections at a time: up to six of a browser, and a websocket for each page. Fewer, if the process may not
have twice as many files open."""

_TRY_AGAIN_LATER: Final = 1013
"""Close code of a websocket (registered with IANA)."""

REQUEST_LIMITS: Final[dict[str, Any]] = {
    "http_server_kwargs": {
        "max_body_size": 64 * 1024,  # the form of the login page is the largest
        "idle_connection_timeout": 75.0,  # seconds until a request, or all headers of one, have come
        "body_timeout": 20.0,
    },
    # What a page asks, with all ranks and steps that it names; answers may be as large as they are.
    "websocket_max_message_size": 2 * 1024**2,
}
"""Options of Bokeh's server for the size of requests and how long they may take."""


def limit_server(server: Server, *, pages: int = MAX_PAGES, connections: int = MAX_CONNECTIONS) -> None:
    """Limit the pages and connections that are open at a time."""
    for context in server._tornado.applications.values():
        _limit_pages(server, context, pages)
    for rule in server._tornado.wildcard_router.rules:
        for base, limited in ((DocHandler, _LimitedPage), (WSHandler, _LimitedSocket)):
            if isinstance(rule.target, type) and issubclass(rule.target, base):
                # The class is Panel's, a subclass of Bokeh's.
                rule.target = type(limited.__name__, (limited, rule.target), {})
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The other half is for recordings.
    _limit_connections(
        server, connections if descriptors == resource.RLIM_INFINITY else min(connections, descriptors // 2)
    )


def _limit_pages(server: Server, context: ApplicationContext, most: int) -> None:
    """Refuse new sessions beyond the maximum, whether a page or a websocket asks for them."""
    create = context.create_session_if_needed

    async def create_if_allowed(session_id: Any, *args: Any, **kwargs: Any) -> Any:
        if len(server.get_sessions()) >= most and all(session.id != session_id for session in context.sessions):
            raise HTTPError(503, "too many pages are open")
        return await create(session_id, *args, **kwargs)

    context.create_session_if_needed = create_if_allowed  # type: ignore[method-assign]


class _LimitedPage(RequestHandler):
    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if status_code != 503:
            super().write_error(status_code, **kwargs)
            return
        self.set_header("Retry-After", "60")
        self.finish(
            render_standalone(
                "problem.html",
                title="Too many pages",
                headline="Too many pages are open",
                message=f"This server keeps {MAX_PAGES} pages open at a time, in all browsers together.",
                advice="Close some, or try again in a minute.",
                way_out="Try again",
                way_out_to="",
            )
        )


class _LimitedSocket(WSHandler):
    async def _async_open(self, token: str) -> None:
        try:
            await super()._async_open(token)
        except HTTPError:
            self.close(_TRY_AGAIN_LATER)


def _limit_connections(server: Server, most: int) -> None:
    """Close connections beyond the maximum as soon as they are accepted."""
    http = server._http
    serve, streams = http.handle_stream, set[IOStream]()

    def serve_if_allowed(stream: IOStream, address: Any) -> None:
        streams.difference_update([each for each in streams if each.closed()])
        if len(streams) >= most:
            stream.close()
            return
        streams.add(stream)
        serve(stream, address)

    http.handle_stream = serve_if_allowed  # type: ignore[method-assign]
