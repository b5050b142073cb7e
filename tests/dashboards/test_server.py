"""The server under many users, and under recordings that are too much for it."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import panel as pn
import pytest

from dashboards import recording as recording_module
from dashboards.app import ROUTES
from dashboards.runs import Runs
from overlapscope.trace import memory
from overlapscope.trace.reader import read_trace
from tests.dashboards.running import running
from tests.synthetic import write_recording


def test_many_users_share_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path, *rest: Any, **more: Any) -> Any:
        read.append(path)
        return read_trace(path, *rest, **more)

    monkeypatch.setattr(recording_module, "read_trace", counted)
    folder = write_recording(tmp_path / "traces", steps=5)
    with running(Runs([folder])) as server, ThreadPoolExecutor(8) as users:
        answers = list(users.map(server.get, ["/", "/timeline", "/stragglers", "/order"] * 4))
    assert {answer.status for answer in answers} == {200}
    assert read == [folder]


def test_a_closed_tab_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = pn.serve
    soon = {"check_unused_sessions_milliseconds": 50, "unused_session_lifetime_milliseconds": 50}
    monkeypatch.setattr(pn, "serve", lambda pages, **options: serve(pages, **{**options, **soon}))
    with running(Runs([write_recording(tmp_path / "traces", ranks=3, steps=30)])) as server:
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


def test_a_recording_that_is_too_large_is_said_on_the_page_and_the_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_recording(tmp_path / "traces", steps=200)
    with running(Runs([folder])) as server:
        with monkeypatch.context() as small:
            small.setattr(memory, "free_bytes", lambda: 1000)
            for route in ("/", "/order"):
                answer = server.get(route)
                assert answer.status == 200
                assert "Open it on a larger machine" in answer.text
        assert "is hidden" in server.get("/").text
