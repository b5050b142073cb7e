"""`overlapscope serve` on the command line, up to where the server starts."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from dashboards.runs import RunIndex
from overlapscope.cli import serve
from overlapscope.errors import OverlapScopeError
from tests.cli.command_line import COMMAND, REPOSITORY
from tests.synthetic import write_recording


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.prepare_parser(parser)
    return parser.parse_args(arguments)


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
def served(monkeypatch) -> list[RunIndex]:
    """What servers were started with, which end as soon as they run."""
    started: list[RunIndex] = []

    def start(runs: RunIndex, address: str, port: int, **_options: object) -> SimpleNamespace:
        started.append(runs)

        def interrupted() -> None:
            raise KeyboardInterrupt

        return SimpleNamespace(port=port or 5006, io_loop=SimpleNamespace(start=interrupted), stop=lambda: None)

    monkeypatch.setattr("dashboards.app.start_server", start)
    return started


def test_an_empty_folder_is_served_all_the_same_and_the_reason_printed(tmp_path, served, capsys):
    assert serve.run(parse(str(tmp_path), "--no-browser")) == 0
    printed = capsys.readouterr()
    assert "empty" in printed.err
    assert str(tmp_path) in printed.out
    assert [runs.folders for runs in served] == [(tmp_path,)]


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path, served, capsys):
    later = tmp_path / "later"
    assert serve.run(parse(str(later), "--no-browser")) == 0
    printed = capsys.readouterr()
    assert f"{later}: no such folder" in printed.err
    assert str(later) in printed.out
    write_recording(later / "first", ranks=1, steps=1)
    assert served[0].path_of("first") == later / "first"


def test_several_folders_are_served_and_one_of_them_may_be_missing(tmp_path, served, capsys):
    write_recording(tmp_path / "nightly" / "monday", ranks=1, steps=1)
    write_recording(tmp_path / "once", ranks=1, steps=1)
    folders = [str(tmp_path / name) for name in ("nightly", "once", "later")]
    assert serve.run(parse(*folders, "--no-browser")) == 0
    printed = capsys.readouterr().out
    assert all(folder in printed for folder in folders)
    assert served[0].path_of("nightly/monday") == tmp_path / "nightly" / "monday"
    assert served[0].path_of("once") == tmp_path / "once"


def test_what_takes_long_is_ready_before_the_address_of_a_single_recording_is_printed(tmp_path, served, capsys):
    folder = write_recording(tmp_path / "traces")
    serve.run(parse(str(folder), "--no-browser"))
    snapshot = served[0].recording(folder).latest()
    assert {"summary", "breakdown_section", "stragglers", "heatmap"} <= vars(snapshot).keys()
    assert capsys.readouterr().err == ""


def address_printed(capsys) -> str:
    return capsys.readouterr().out.partition(" at ")[2].split()[0]


def test_on_this_machine_alone_nothing_but_the_address_is_needed(tmp_path, served, capsys):
    serve.run(parse(str(tmp_path), "--no-browser", "--port", "5006"))
    assert address_printed(capsys) == "http://localhost:5006/"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "host.example"])
def test_any_other_address_gets_a_token_of_its_own_which_is_printed(tmp_path, served, capsys, address):
    printed = set()
    for _ in range(2):
        serve.run(parse(str(tmp_path), "--no-browser", "--port", "5006", "--address", address))
        out = capsys.readouterr().out
        printed.add(out.partition(" at ")[2].split()[0])
        assert "not encrypted" in out
    assert len(printed) == 2
    for url in printed:
        assert "localhost" not in url
        assert urlsplit(url).hostname not in ("0.0.0.0", "::")
        assert len(parse_qs(urlsplit(url).query)["token"][0]) >= 32


def test_a_token_from_a_file_is_not_printed(tmp_path, served, capsys):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    serve.run(parse(str(tmp_path), "--no-browser", "--address", "0.0.0.0", "--token-file", str(file)))
    assert "token=" not in (out := capsys.readouterr().out)
    assert "0123456789abcdef" not in out


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("--token-file", "short", "at least 16 characters"),
        ("--token-file", None, "No such file"),
        ("--token-file", b"\xff\xfe", "not text"),
        ("--basic-auth", "ada:secret", "not a JSON object"),
        ("--basic-auth", "[]", "not a JSON object"),
        ("--basic-auth", "{}", "not a JSON object"),
        ("--basic-auth", '{"ada": 1}', "not a JSON object"),
        ("--basic-auth", '{"ada": ""}', "not a JSON object"),
    ],
)
def test_secrets_that_are_none_are_one_clear_error(tmp_path, served, option, content, said):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OverlapScopeError, match=f"{file}: .*{said}"):
        serve.run(parse(str(tmp_path), "--no-browser", option, str(file)))


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[int]:
    """The port of a server in a process of its own, which writes its output and errors into files beside the traces."""
    command = [*COMMAND, "serve", str(folder), "--port", "0", "--no-browser", *options]
    output, errors = folder.parent / "out", folder.parent / "err"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=REPOSITORY, env={**os.environ, **environment})
    try:
        while not (found := re.search(r"http://\S+:(\d+)/", output.read_text())):
            assert process.poll() is None, errors.read_text()
            time.sleep(0.1)
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(60)


def answer_of(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Status and place to go on to."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    connection.close()
    return answer.status, answer.headers.get("Location", "")


def test_all_interfaces_are_served_without_a_word_from_libraries(tmp_path):
    """Bokeh warns of wildcards, and of everything that it refuses."""
    with serving(write_recording(tmp_path / "traces", steps=2), "--address", "0.0.0.0") as port:
        assert answer_of(port, "/timeline") == (403, "")
    # A recording may be slow to read.
    assert [line for line in (tmp_path / "err").read_text().splitlines() if not line.startswith("overlapscope: ")] == []


def test_a_provider_is_asked_who_it_is_for_every_page(tmp_path):
    folder = write_recording(tmp_path / "traces", steps=2)
    secrets = {"PANEL_OAUTH_KEY": "key", "PANEL_OAUTH_SECRET": "secret"}
    with serving(folder, "--oauth", "github", "--prefix", "lab", **secrets) as port:
        assert answer_of(port, "/lab/timeline") == (302, "./login?next=%2Flab%2Ftimeline")
        assert (
            answer_of(port, "/lab/plots/login?next=%2Flab%2Fplots%2Forder")[1]
            == "/lab/login?next=%2Flab%2Fplots%2Forder"
        )
        status, provider = answer_of(port, "/lab/login")
        assert (status, urlsplit(provider).hostname) == (302, "github.com")
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "bokeh, none"}
        assert answer_of(port, "/lab/timeline/ws", **upgrade)[0] == 403


def test_a_provider_without_a_key_or_unknown_is_one_clear_error(tmp_path, monkeypatch):
    folder = str(write_recording(tmp_path / "traces", steps=2))
    monkeypatch.delenv("PANEL_OAUTH_KEY", raising=False)
    with pytest.raises(OverlapScopeError, match="--oauth github needs PANEL_OAUTH_KEY in the environment"):
        serve.run(parse(folder, "--no-browser", "--oauth", "github"))
    monkeypatch.setenv("PANEL_OAUTH_KEY", "key")
    monkeypatch.setenv("PANEL_OAUTH_SECRET", "secret")
    with pytest.raises(OverlapScopeError, match=r"--oauth nobody: not a provider that Panel knows; those are .*okta"):
        serve.run(parse(folder, "--no-browser", "--oauth", "nobody"))
