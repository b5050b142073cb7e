"""What stands in front of all pages, files and websockets of the server, and asks for the token or a password."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from bokeh.server.server import Server
from panel.auth import AUTH_PROVIDERS
from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import RedirectHandler, RequestHandler

from dashboards.access import Access, Refusal
from dashboards.pages.shell import render_alone
from overlapscope.errors import OverlapScopeError

SERVER_OPTIONS: Final[dict[str, Any]] = {
    # Pages carry a description of their request; nobody needs the cookie in it.
    "include_headers": [],
    "include_cookies": [],
    # A request that is refused is no news for the terminal; errors are logged beside this.
    "log_function": lambda _handler: None,
}
"""Options of Bokeh's server."""


def login_options(access: Access) -> dict[str, Any]:
    """Options of ``panel.serve`` for a provider who is asked who it is; Panel reads the rest from the environment.

    Raises:
        OverlapScopeError: Panel doesn't know the provider.
    """
    if access.oauth is None:
        return {}
    if access.oauth not in AUTH_PROVIDERS:
        known = ", ".join(sorted(AUTH_PROVIDERS))
        raise OverlapScopeError(f"--oauth {access.oauth}: not a provider that Panel knows; those are {known}")
    return {"oauth_provider": access.oauth, "cookie_secret": access.secret.hex()}


def guard(server: Server, access: Access) -> None:
    """Let through only what a server should answer."""
    server._tornado.settings |= {"default_handler_class": _Nowhere, "default_handler_args": {"prefix": server.prefix}}
    # Rules for any host come before those of the pages.
    server._tornado.add_handlers(".*", [Rule(_Refused(access), _Door)])
    if access.oauth:
        # Panel sends pages that lie deeper to a login beside them.
        login = f"{server.prefix}/login"
        server._tornado.add_handlers(".*", [(rf"{re.escape(server.prefix)}/.+/login", RedirectHandler, {"url": login})])
    # Bokeh's own list of origins knows neither IPv6 nor names that are not known beforehand: the gate decides.
    server._tornado._websocket_origins.add("*")


class _Nowhere(RequestHandler):
    """Answers at addresses where nothing is."""

    def initialize(self, prefix: str) -> None:
        self._prefix = prefix

    def prepare(self) -> None:
        path, prefix = self.request.path, self._prefix
        # Relative: a proxy may have taken off what the path begins with.
        to_top = "../" * (path.removeprefix(prefix).count("/") - 1) if path.startswith(f"{prefix}/") else f"{prefix}/"
        self.set_status(404)
        self.set_header("Cache-Control", "no-store")
        self.finish(
            render_alone(
                "problem.html",
                title="No such page",
                headline="There is no such page",
                message=f"Nothing is at {path}.",
                advice="",
                way_out="Go to the first page",
                way_out_to=to_top or "./",
            )
        )


class _Refused(Matcher):
    """Matches requests that are not answered."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        refusal = self._access.refusal(request)
        return None if refusal is None else {"target_kwargs": {"access": self._access, "refusal": refusal}}


class _Door(RequestHandler):
    """Answers what is refused: says why, or asks for the token or a password."""

    def initialize(self, access: Access, refusal: Refusal) -> None:
        self._access = access
        self._refusal = refusal

    def get(self) -> None:
        if self._refusal is not Refusal.LOGIN:
            self._say_why()
        elif self._access.admits(token=self.get_query_argument("token", "")):
            self._let_in()
        elif self._access.knows(self.request):
            self._go_on()
        else:
            self._ask()

    head = get

    def post(self) -> None:
        if self._refusal is not Refusal.LOGIN:
            return self._say_why()
        given = {name: self.get_body_argument(name, "") for name in ("token", "user", "password")}
        return self._let_in() if self._access.admits(**given) else self._ask(is_wrong=True)

    def _let_in(self) -> None:
        self.set_cookie(
            self._access.cookie_name,
            self._access.login_cookie().decode(),
            httponly=True,
            samesite="lax",
            secure=self.request.protocol == "https",
        )
        self._go_on()

    def _go_on(self) -> None:
        """To the same address without the token, which would otherwise stay in the history of the browser."""
        query = [(name, value) for name, value in parse_qsl(self.request.query, True) if name != "token"]
        self.set_header("Referrer-Policy", "no-referrer")
        # Relative: a proxy may have taken off what the path begins with.
        place = "./" + self.request.path.rpartition("/")[2]
        self.redirect(f"{place}?{urlencode(query)}" if query else place, status=303)

    def _ask(self, *, is_wrong: bool = False) -> None:
        self._refuse(
            "login.html",
            title="Log in",
            has_token=self._access.token is not None,
            has_passwords=bool(self._access.passwords),
            is_wrong=is_wrong or bool(self.get_query_argument("token", "")),
        )

    def _say_why(self) -> None:
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
        self.finish(render_alone(template, title=title, **variables))
