"""Who may use the server: by which names it is reached, and who is let in.

A page of another site must not read a recording through the browser of somebody who can: neither under a name of its
own that leads here (DNS rebinding), nor by opening a websocket. Both are told by headers that browsers set.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from base64 import b64decode
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest
from tornado.web import create_signed_value, decode_signed_value

from overlapscope.errors import OverlapScopeError

LEAST_TOKEN_LENGTH: Final = 16
_LOGIN_DAYS: Final = 31


class Refusal(Enum):
    """Why a request is not answered."""

    HOST = "it calls the server by a name that is not its own"
    ORIGIN = "a page of another site sent it"
    LOGIN = "it has to log in first"


class Access:
    """Who may use a server.

    Args:
        token: what lets anybody in; None if no token does.
        is_token_made: it is known to nobody yet, and so has to be printed.
        passwords: of each user who may log in by name.
        hosts: names of the server, beside those of this machine's loopback.
        oauth: the provider who is asked who it is, by Panel's name.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        is_token_made: bool = False,
        passwords: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        oauth: str | None = None,
    ) -> None:
        self.token = token
        self.is_token_made = is_token_made
        self.passwords = passwords or {}
        self.hosts = frozenset(map(str.lower, hosts))
        self.oauth = oauth
        # A token that stays the same when the server is started again keeps those who are in.
        self.secret = hashlib.sha256(b"cookies of " + token.encode()).digest() if token else secrets.token_bytes(32)
        # Browsers send the cookies of a host to all of its ports.
        self.cookie_name = f"overlapscope-{hashlib.sha256(self.secret).hexdigest()[:8]}"

    @property
    def needs_login(self) -> bool:
        """Whether only those are let in who know the token or a password."""
        return self.token is not None or bool(self.passwords)

    def refusal(self, request: HTTPServerRequest) -> Refusal | None:
        """Why a request is not answered; None if it is."""
        host = name_of_host(request.host)
        # Cookies belong to a name: under any other one nobody is logged in.
        if not (self.needs_login or self.oauth or self._is_own(host)):
            return Refusal.HOST
        is_socket = request.headers.get("Upgrade", "").lower() == "websocket"
        if is_socket and not self._is_own_page(request.headers.get("Origin"), request.host):
            return Refusal.ORIGIN
        if self.needs_login and ("token" in request.query_arguments or not self.knows(request)):
            return Refusal.LOGIN
        return None

    def knows(self, request: HTTPServerRequest) -> bool:
        """Whether who sent a request has logged in, or shows what lets in."""
        if self._admits_program(request.headers.get("Authorization", "")):
            return True
        cookie = request.cookies.get(self.cookie_name)
        value = cookie.value if cookie else None
        return decode_signed_value(self.secret, self.cookie_name, value, max_age_days=_LOGIN_DAYS) is not None

    def admits(self, *, token: str = "", user: str = "", password: str = "") -> bool:
        """Whether a token, or a name and password, let somebody in."""
        if self.token is not None and hmac.compare_digest(token.encode(), self.token.encode()):
            return True
        return user in self.passwords and hmac.compare_digest(password.encode(), self.passwords[user].encode())

    def _admits_program(self, authorization: str) -> bool:
        """Whether a header lets in who keeps no cookies, such as Prometheus or curl."""
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self.admits(token=credentials)
        if scheme.lower() != "basic":
            return False
        with suppress(ValueError):  # not base64, or not text
            user, _, password = b64decode(credentials, validate=True).decode().partition(":")
            return self.admits(user=user, password=password)
        return False

    def login_cookie(self) -> bytes:
        """The value of the cookie of somebody who is let in."""
        return create_signed_value(self.secret, self.cookie_name, "admitted")

    def _is_own_page(self, origin: str | None, host: str) -> bool:
        """Whether a page of this server sends a request, or no page at all."""
        if origin is None:
            return True
        asked_from = origin.rpartition("://")[2].lower()
        return asked_from == host.lower() or name_of_host(asked_from) in self.hosts

    def _is_own(self, host: str) -> bool:
        return is_loopback(host) or host in self.hosts


def name_of_host(host: str) -> str:
    """The name or address in a Host header or an origin, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or address only leads to the machine it is used on."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def made_token() -> str:
    """A token that can't be guessed."""
    return secrets.token_urlsafe(24)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        OverlapScopeError: it can't be read, or is too easy to guess.
    """
    token = _text_of(path, "a line with a token").strip()
    if len(token) < LEAST_TOKEN_LENGTH:
        raise OverlapScopeError(
            f"{path}: a token has at least {LEAST_TOKEN_LENGTH} characters; 'openssl rand -hex 24 > {path}' makes one"
        )
    return token


def read_passwords(path: Path) -> dict[str, str]:
    """The password of each user in a file.

    Raises:
        OverlapScopeError: it can't be read, or is not a JSON object of names and passwords.
    """
    what = 'a JSON object of users and passwords, such as {"ada": "..."}'
    try:
        passwords = json.loads(_text_of(path, what))
    except ValueError:
        passwords = None
    is_known = isinstance(passwords, dict) and passwords and all(isinstance(each, str) for each in passwords.values())
    if not is_known or not all(passwords.values()):
        raise OverlapScopeError(f"{path}: not {what}")
    return dict(passwords)


def _text_of(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise OverlapScopeError(f"{path}: {reason}; it should hold {what}") from None
