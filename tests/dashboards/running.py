"""A server in a thread of this process, and requests as any client may send them."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage
from typing import Any

from bokeh.server.server import Server

from dashboards.access import Access
from dashboards.app import start_server
from dashboards.runs import RunIndex


@dataclass(frozen=True)
class Answer:
    """What a server answers."""

    status: int
    headers: HTTPMessage
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    port: int
    server: Server

    def get(self, path: str = "/", *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Send a request; ``Content_Type`` and the like are headers."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def open_socket(self, path: str = "/ws", **headers: str) -> int:
        """The status with which a websocket is opened (101) or refused."""
        lines = [f"GET {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol: bokeh, none", "", ""]
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as raw:
            raw.sendall("\r\n".join(lines).encode())
            return int(raw.recv(4096).split()[1])


@contextmanager
def running(runs: RunIndex, access: Access | None = None, **options: Any) -> Iterator[Running]:
    """Serve runs on 127.0.0.1."""
    started: queue.Queue[Server] = queue.Queue()

    def run() -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        server = start_server(runs, "127.0.0.1", 0, access=access, **options)
        started.put(server)
        server.io_loop.start()
        server.stop()
        server.io_loop.close(all_fds=True)

    thread = threading.Thread(target=run)
    thread.start()
    server = started.get(timeout=60)
    try:
        yield Running(server.port, server)
    finally:
        server.io_loop.add_callback(server.io_loop.stop)
        thread.join(60)
