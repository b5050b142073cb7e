"""The server under many users, and under recordings that are too much for it."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import panel as pn
import pytest
from bokeh.util.token import generate_jwt_token, generate_session_id
from tornado.websocket import websocket_connect

from dashboards import app
from dashboards import recording as recording_module
from dashboards.app import ROUTES
from dashboards.limits import limit_server
from dashboards.runs import RunIndex
from overlapscope.trace import table_file
from overlapscope.trace.recording import read_trace
from tests.dashboards.running import running
from tests.synthetic import write_recording


def test_many_users_share_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path, *rest: Any, **more: Any) -> Any:
        read.append(path)
        return read_trace(path, *rest, **more)

    monkeypatch.setattr(recording_module, "read_trace", counted)
    folder = write_recording(tmp_path / "traces", steps=5)
    with running(RunIndex([folder])) as server, ThreadPoolExecutor(8) as users:
        answers = list(users.map(server.get, ["/", "/timeline", "/stragglers", "/order"] * 2))
    assert {answer.status for answer in answers} == {200}
    assert read == [folder]


@pytest.mark.slow
def test_a_closed_tab_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = pn.serve
    soon = {"check_unused_sessions_milliseconds": 50, "unused_session_lifetime_milliseconds": 50}
    monkeypatch.setattr(pn, "serve", lambda pages, **options: serve(pages, **{**options, **soon}))
    with running(RunIndex([write_recording(tmp_path / "traces", ranks=3, steps=30)])) as server:
        documents = []
        for route in ROUTES:
            assert server.get(route).status == 200
            documents += [weakref.ref(session.document) for session in server.server.get_sessions()]
        assert documents
        until = time.monotonic() + 60
        while (left := sum(document() is not None for document in documents)) and time.monotonic() < until:
            gc.collect()
        assert left == 0
        assert server.server.get_sessions() == []


def open_and_leave(port: int, code: int | None) -> None:
    """Be a browser that has opened a page and leaves it with a code, or whose line breaks.

    In a thread of its own: Playwright leaves a loop running in that of the tests.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, _open_and_leave(port, code)).result()


async def _open_and_leave(port: int, code: int | None) -> None:
    token = generate_jwt_token(generate_session_id())
    page = await websocket_connect(f"ws://127.0.0.1:{port}/ws", subprotocols=["bokeh", token])
    assert "ACK" in str(await page.read_message())
    if code is None:
        page.protocol.stream.close()
    else:
        page.close(code)
        while await page.read_message() is not None:
            pass  # what was on its way


def test_a_page_that_is_left_is_forgotten_before_one_whose_line_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, often = pn.serve, {"check_unused_sessions_milliseconds": 50}
    monkeypatch.setattr(pn, "serve", lambda pages, **options: serve(pages, **{**options, **often}))
    with running(RunIndex([write_recording(tmp_path / "traces", steps=5)])) as server:
        open_and_leave(server.port, None)
        (broken,) = server.server.get_sessions()
        open_and_leave(server.port, 1001)
        until = time.monotonic() + 60
        while (broken.connection_count or len(server.server.get_sessions()) > 1) and time.monotonic() < until:
            time.sleep(0.05)
        assert server.server.get_sessions() == [broken]


def test_one_client_can_not_use_up_pages_connections_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "limit_server", partial(limit_server, pages=2, connections=8))
    with running(RunIndex([write_recording(tmp_path / "traces", steps=5)])) as server:
        with ExitStack() as held:
            connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(10)]
            for connection in connections:
                held.enter_context(connection)
            assert [connection.recv(1) for connection in connections[8:]] == [b"", b""]  # the server has closed them
        until, statuses = time.monotonic() + 60, []
        while len(statuses) < 3 and time.monotonic() < until:
            with suppress(ConnectionError):  # until it has noticed that the others are closed
                statuses.append(server.get("/order").status)
        assert statuses == [200, 200, 503]
        with pytest.raises(AssertionError, match="ACK"):
            open_and_leave(server.port, None)
        assert server.get("/tables/steps.csv").status == 200
        assert len(server.server.get_sessions()) == 2
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
            raw.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70000\r\n\r\n")
            assert raw.recv(4096).startswith(b"HTTP/1.1 400")  # before any of the body was sent


def test_a_recording_that_is_too_large_is_said_on_the_page_and_the_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_recording(tmp_path / "traces", steps=200)
    with running(RunIndex([folder])) as server:
        with monkeypatch.context() as small:
            for module in (table_file, recording_module):
                small.setattr(module, "free_bytes", lambda: 1000)
            for route in ("/?read=all", "/order?read=all"):
                answer = server.get(route)
                assert answer.status == 200
                assert re.search(r"takes about [^<]* of memory, and [^<]* are free", answer.text)
        assert "is hidden" in server.get("/").text
