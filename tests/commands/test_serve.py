"""`overlapscope serve` on the command line, up to where the server starts."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dashboards.recording import Recording
from overlapscope.commands import serve
from overlapscope.errors import OverlapScopeError
from tests.synthetic import write_recording


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.prepare_parser(parser)
    return parser.parse_args(arguments)


def test_a_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(OverlapScopeError, match="no such folder; record one with"):
        serve.run(parse(str(tmp_path / "nothing")))


def test_a_port_that_is_taken_is_one_clear_error(tmp_path):
    folder = write_recording(tmp_path / "traces")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OverlapScopeError, match=f"can't listen on 127.0.0.1 port {port}"):
            serve.run(parse(str(folder), "--port", str(port), "--no-browser"))


def test_without_a_port_the_next_free_one_is_taken(tmp_path):
    from dashboards.app import _free_port

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _free_port("127.0.0.1", [port, port + 1, 0]) != port


@pytest.fixture
def served(monkeypatch) -> list[Recording]:
    """The recordings that servers were started with, which end as soon as they run."""
    recordings: list[Recording] = []

    def start(recording: Recording, address: str, port: int) -> SimpleNamespace:
        recordings.append(recording)

        def interrupted() -> None:
            raise KeyboardInterrupt

        return SimpleNamespace(port=port, io_loop=SimpleNamespace(start=interrupted), stop=lambda: None)

    monkeypatch.setattr("dashboards.app.start_server", start)
    return recordings


def test_an_empty_folder_is_served_all_the_same_and_the_reason_printed(tmp_path, served, capsys):
    assert serve.run(parse(str(tmp_path), "--no-browser")) == 0
    printed = capsys.readouterr()
    assert "empty" in printed.err
    assert str(tmp_path) in printed.out
    assert [recording.folder for recording in served] == [tmp_path]


def test_what_takes_long_is_ready_before_the_address_is_printed(tmp_path, served, capsys):
    serve.run(parse(str(write_recording(tmp_path / "traces")), "--no-browser"))
    snapshot = served[0].newest()
    assert {"summary", "rank_means", "stragglers", "heatmap"} <= vars(snapshot).keys()
    assert capsys.readouterr().err == ""


def test_nonsense_ports_are_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        parse("traces", "--port", "70000")


def test_help_imports_no_web_server():
    check = "import sys, overlapscope.commands.serve; sys.exit(bool({'panel', 'bokeh', 'pandas'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0
