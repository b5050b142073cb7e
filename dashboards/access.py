"""Access control of the server: allowed host names, origins and logins.

A page of another site must not read a recording through the browser of an authorized user: neither under a host name of
its own that resolves to this server (DNS rebinding), nor by opening a websocket (cross-site hijacking). Both are
recognized by headers that browsers set.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from base64 import b64decode
from collections import deque
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

MIN_TOKEN_LENGTH: Final = 16
MAX_WRONG_PASSWORDS: Final = 20
WRONG_PASSWORDS_PERIOD_S: Final = 60.0
"""After ``MAX_WRONG_PASSWORDS`` of a user in this time, none is accepted for the rest of it."""
_LOGIN_DAYS: Final = 31


class Refusal(Enum):
    """Reason why a request is refused."""

    HOST = "it calls the server by a name that is not its own"
    ORIGIN = "a page of another site sent it"
    LOGIN = "it has to log in first"


class Access:
    """Access rules of a server.

    Args:
        token: token that authorizes anybody who has it; None without one.
        is_token_generated: the token was generated, and so has to be printed for the user to know it.
        passwords: password of each user who may log in by name.
        hosts: host names of the server, in addition to loopback.
        oauth: OAuth provider, by Panel's name; None without one.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        is_token_generated: bool = False,
        passwords: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        oauth: str | None = None,
    ) -> None:
        self.token = token
        self.is_token_generated = is_token_generated
        self.passwords = passwords or {}
        # Of each user alone, so that guessing keeps nobody else out. A token is too long to be guessed.
        self._wrong_passwords = {user: deque[float](maxlen=MAX_WRONG_PASSWORDS) for user in self.passwords}
        self.hosts = frozenset(map(str.lower, hosts))
        self.oauth = oauth
        # Derived from a token, so that logins survive a restart of the server with the same token.
        self.secret = hashlib.sha256(b"cookies of " + token.encode()).digest() if token else secrets.token_bytes(32)
        # A distinct name, as browsers send the cookies of a host to all its ports, and so to other servers.
        self.cookie_name = f"overlapscope-{hashlib.sha256(self.secret).hexdigest()[:8]}"

    @property
    def needs_login(self) -> bool:
        """Return whether requests have to be authorized by a token or a password."""
        return self.token is not None or bool(self.passwords)

    def refusal(self, request: HTTPServerRequest) -> Refusal | None:
        """Return why a request is refused; None if it is allowed."""
        host = parse_host_name(request.host)
        # With a login, any host name is safe: cookies belong to a name, so nobody is logged in under a foreign one.
        if not (self.needs_login or self.oauth or self._is_allowed_host(host)):
            return Refusal.HOST
        is_socket = request.headers.get("Upgrade", "").lower() == "websocket"
        if is_socket and not self._is_same_origin(request.headers.get("Origin"), request.host):
            return Refusal.ORIGIN
        if self.needs_login and ("token" in request.query_arguments or not self.is_authorized(request)):
            return Refusal.LOGIN
        return None

    def is_authorized(self, request: HTTPServerRequest) -> bool:
        """Return whether a request is authorized, by the cookie of a login or by an Authorization header."""
        if self._is_valid_authorization(request.headers.get("Authorization", "")):
            return True
        cookie = request.cookies.get(self.cookie_name)
        value = cookie.value if cookie else None
        return decode_signed_value(self.secret, self.cookie_name, value, max_age_days=_LOGIN_DAYS) is not None

    def is_valid_login(self, *, token: str = "", user: str = "", password: str = "") -> bool:
        """Return whether a token, or a user name and password, is valid."""
        if self.token is not None and hmac.compare_digest(token.encode(), self.token.encode()):
            return True
        return user in self.passwords and self._is_valid_password(user, password)

    def _is_valid_password(self, user: str, password: str) -> bool:
        """Return whether a password is valid; none is while too many wrong ones were tried for that user."""
        wrong, now_s = self._wrong_passwords[user], time.monotonic()
        if len(wrong) == MAX_WRONG_PASSWORDS and now_s - wrong[0] < WRONG_PASSWORDS_PERIOD_S:
            return False
        is_valid = hmac.compare_digest(password.encode(), self.passwords[user].encode())
        if not is_valid:
            wrong.append(now_s)
        return is_valid

    def _is_valid_authorization(self, authorization: str) -> bool:
        """Return whether an Authorization header is valid, for clients without cookies such as Prometheus or curl."""
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self.is_valid_login(token=credentials)
        if scheme.lower() != "basic":
            return False
        with suppress(ValueError):  # not base64, or not text
            user, _, password = b64decode(credentials, validate=True).decode().partition(":")
            return self.is_valid_login(user=user, password=password)
        return False

    def login_cookie(self) -> bytes:
        """Create the signed value of the cookie of a logged-in user."""
        return create_signed_value(self.secret, self.cookie_name, "admitted")

    def _is_same_origin(self, origin: str | None, host: str) -> bool:
        """Return whether a request comes from a page of this server, or from no page at all."""
        if origin is None:
            return True
        asked_from = origin.rpartition("://")[2].lower()
        return asked_from == host.lower() or parse_host_name(asked_from) in self.hosts

    def _is_allowed_host(self, host: str) -> bool:
        return is_loopback(host) or host in self.hosts


def choose_access(
    address: str, *, token_file: Path | None, password_file: Path | None, oauth: str | None, hosts: Collection[str]
) -> Access:
    """Return the access rules for options, of which at most one names a login.

    By default a server on loopback is open, and one on another address generates a token.

    Args:
        address: address that the server listens on.
        token_file: file with the token.
        password_file: JSON file with the password of each user.
        oauth: OAuth provider, by Panel's name.
        hosts: host names of the server, in addition to loopback.

    Raises:
        OverlapScopeError: a file can't be used, or the provider's variables are missing.
    """
    if oauth is not None:
        for variable in ("PANEL_OAUTH_KEY", "PANEL_OAUTH_SECRET"):
            if not os.environ.get(variable):
                raise OverlapScopeError(f"--oauth {oauth} needs {variable} in the environment, from the provider")
        return Access(oauth=oauth, hosts=hosts)
    if password_file is not None:
        return Access(passwords=read_passwords(password_file), hosts=hosts)
    if token_file is not None:
        return Access(token=read_token(token_file), hosts=hosts)
    is_open = is_loopback(address)
    return Access(token=None if is_open else generate_token(), is_token_generated=not is_open, hosts=hosts)


def parse_host_name(host: str) -> str:
    """Return the host name or address in a Host header or an origin, without the port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is loopback."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def generate_token() -> str:
    """Generate a random token."""
    return secrets.token_urlsafe(24)


def read_token(path: Path) -> str:
    """Read the token in a file.

    Raises:
        OverlapScopeError: the file can't be read, or the token is too short.
    """
    token = _text_of(path, "a line with a token").strip()
    if len(token) < MIN_TOKEN_LENGTH:
        raise OverlapScopeError(
            f"{path}: a token has at least {MIN_TOKEN_LENGTH} characters; 'openssl rand -hex 24 > {path}' makes one"
        )
    return token


def read_passwords(path: Path) -> dict[str, str]:
    """Read the password of each user from a JSON file.

    Raises:
        OverlapScopeError: the file can't be read, or is not a JSON object of names and passwords.
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
