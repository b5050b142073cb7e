"""Authentication in front of all pages, files and websockets of the server, with a login page for token or password."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from bokeh.server.server import Server
from panel.auth import AUTH_PROVIDERS
from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import OutputTransform, RedirectHandler, RequestHandler

from dashboards.access import Access, Refusal
from dashboards.health import HEALTH_ROUTE
from dashboards.pages.shell import render_standalone
from dashboards.policy import policy_headers
from overlapscope.errors import OverlapScopeError

SERVER_OPTIONS: Final[dict[str, Any]] = {
    # Sessions carry a description of their request; keep headers and cookies out of it.
    "include_headers": [],
    "include_cookies": [],
    # Don't log refused requests to the terminal; errors are logged elsewhere.
    "log_function": lambda _handler: None,
}
"""Options of Bokeh's server for headers, cookies and logging."""


def login_options(access: Access) -> dict[str, Any]:
    """Return the options of ``panel.serve`` for an OAuth provider; Panel reads the others from the environment.

    Raises:
        OverlapScopeError: Panel doesn't support the provider.
    """
    if access.oauth is None:
        return {}
    if access.oauth not in AUTH_PROVIDERS:
        known = ", ".join(sorted(AUTH_PROVIDERS))
        raise OverlapScopeError(f"--oauth {access.oauth}: not a provider that Panel knows; those are {known}")
    return {"oauth_provider": access.oauth, "cookie_secret": access.secret.hex()}


def install_access_rules(server: Server, access: Access) -> None:
    """Install the access rules on a server: its handlers get only requests that are allowed."""
    server._tornado.settings |= {
        "default_handler_class": _NotFoundHandler,
        "default_handler_args": {"prefix": server.prefix},
    }
    # Rules for any host are matched before those of the pages.
    server._tornado.add_handlers(".*", [Rule(_RefusedRequests(access, server.prefix), _LoginHandler)])
    if access.oauth:
        # Panel redirects pages in subfolders to a login page in the same subfolder.
        login = f"{server.prefix}/login"
        server._tornado.add_handlers(".*", [(rf"{re.escape(server.prefix)}/.+/login", RedirectHandler, {"url": login})])
    # Bokeh's list of origins supports neither IPv6 nor names that are not known beforehand: ``Access`` decides instead.
    server._tornado._websocket_origins.add("*")
    server._tornado.add_transform(_PolicyHeaders)


class _PolicyHeaders(OutputTransform):
    """Headers with the policies, of every answer; what a handler has set itself stays."""

    def __init__(self, request: HTTPServerRequest) -> None:
        self._headers = policy_headers(request.path)

    def transform_first_chunk(
        self,
        status_code: int,
        headers: HTTPHeaders,
        chunk: bytes,
        finishing: bool,  # noqa: ARG002 - a method of tornado's
    ) -> tuple[int, HTTPHeaders, bytes]:
        for name, value in self._headers.items():
            headers.setdefault(name, value)
        return status_code, headers, chunk


class _NotFoundHandler(RequestHandler):
    """Handler of URLs that don't exist."""

    def initialize(self, prefix: str) -> None:
        self._prefix = prefix

    def prepare(self) -> None:
        path, prefix = self.request.path, self._prefix
        # Relative: a proxy may have stripped a prefix from the path.
        top_url = "../" * (path.removeprefix(prefix).count("/") - 1) if path.startswith(f"{prefix}/") else f"{prefix}/"
        self.set_status(404)
        self.set_header("Cache-Control", "no-store")
        self.finish(
            render_standalone(
                "problem.html",
                title="No such page",
                headline="There is no such page",
                message=f"Nothing is at {path}.",
                advice="",
                way_out="Go to the first page",
                way_out_to=top_url or "./",
            )
        )


class _RefusedRequests(Matcher):
    """Matcher of requests that are refused."""

    def __init__(self, access: Access, prefix: str) -> None:
        self._access = access
        self._open_path = prefix + HEALTH_ROUTE

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        if request.path == self._open_path:
            return None
        refusal = self._access.refusal(request)
        return None if refusal is None else {"target_kwargs": {"access": self._access, "refusal": refusal}}


class _LoginHandler(RequestHandler):
    """Handler of refused requests: shows the reason, or the login page."""

    def initialize(self, access: Access, refusal: Refusal) -> None:
        self._access = access
        self._refusal = refusal

    def get(self) -> None:
        if self._refusal is not Refusal.LOGIN:
            self._show_refusal()
        elif self._access.is_valid_login(token=self.get_query_argument("token", "")):
            self._log_in()
        elif self._access.is_authorized(self.request):
            self._redirect_without_token()
        else:
            self._show_login()

    head = get

    def post(self) -> None:
        if self._refusal is not Refusal.LOGIN:
            return self._show_refusal()
        given = {name: self.get_body_argument(name, "") for name in ("token", "user", "password")}
        return self._log_in() if self._access.is_valid_login(**given) else self._show_login(is_wrong=True)

    def _log_in(self) -> None:
        self.set_cookie(
            self._access.cookie_name,
            self._access.login_cookie().decode(),
            httponly=True,
            samesite="lax",
            secure=self.request.protocol == "https",
        )
        self._redirect_without_token()

    def _redirect_without_token(self) -> None:
        """Redirect to the same URL without the token, which would otherwise stay in the history of the browser."""
        query = [(name, value) for name, value in parse_qsl(self.request.query, True) if name != "token"]
        self.set_header("Referrer-Policy", "no-referrer")
        # Relative: a proxy may have stripped a prefix from the path.
        relative_url = "./" + self.request.path.rpartition("/")[2]
        self.redirect(f"{relative_url}?{urlencode(query)}" if query else relative_url, status=303)

    def _show_login(self, *, is_wrong: bool = False) -> None:
        self._refuse(
            "login.html",
            title="Log in",
            has_token=self._access.token is not None,
            has_passwords=bool(self._access.passwords),
            is_wrong=is_wrong or bool(self.get_query_argument("token", "")),
        )

    def _show_refusal(self) -> None:
        self._refuse(
            "problem.html",
            title="Not here",
            headline="This server is not reached by that name",
            message=f"It answers to localhost, and not to {self.request.host}: otherwise any site could lead a name of "
            "its own to this machine, and read the recording through your browser.",
            advice="If that name is the server's own, as behind a proxy, start it with --allow-host and the name.",
        )

    def _refuse(self, template: str, *, title: str, **variables: Any) -> None:
        self.set_status(403)
        self.set_header("Cache-Control", "no-store")
        self.finish(render_standalone(template, title=title, **variables))
