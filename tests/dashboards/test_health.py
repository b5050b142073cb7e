"""What a container's health check gets from the server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dashboards.access import Access
from dashboards.runs import RunIndex
from overlapscope import __version__
from tests.dashboards.running import Running, running
from tests.synthetic import write_recording

TOKEN = "a token that nobody guesses"


def health(server: Running, path: str = "/health", **headers: str) -> dict[str, object]:
    answer = server.get(path, **headers)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    (line,) = answer.text.splitlines()
    return dict(json.loads(line))


@pytest.mark.parametrize("access", [None, Access(token=TOKEN), Access(passwords={"ada": "engine"})])
def test_a_probe_is_answered_whoever_may_see_the_pages_and_learns_nothing_else(
    tmp_path: Path, access: Access | None
) -> None:
    with running(RunIndex([write_recording(tmp_path / "secret")]), access) as server:
        for host in (f"localhost:{server.port}", "10.0.0.7:5006"):
            assert health(server, Host=host) == {"version": __version__, "recordings_readable": True}
        assert server.get("/healthy").status == (404 if access is None else 403)
        assert server.get("/health/../", Host="10.0.0.7:5006").status == 403


def test_a_recording_that_is_not_there_is_no_reason_for_a_restart(tmp_path: Path) -> None:
    recording = write_recording(tmp_path / "a")
    with running(RunIndex([recording, tmp_path / "later"])) as server:
        assert health(server)["recordings_readable"] is False
        os.mkdir(tmp_path / "later")
        assert health(server)["recordings_readable"] is True


def test_it_is_where_a_proxy_expects_it(tmp_path: Path) -> None:
    with running(RunIndex([write_recording(tmp_path / "a")]), Access(token=TOKEN), prefix="/lab") as server:
        assert health(server, "/lab/health")["version"] == __version__
