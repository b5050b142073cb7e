"""Recordings at URLs: commands that read tables say of them what they say of a folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from overlapscope.chunked_analysis import ChunkedAnalysis, analyze_recording
from overlapscope.trace import load
from overlapscope.trace.folders import resolve_recording_path
from overlapscope.trace.recording import open_recording, read_trace
from overlapscope.trace.schema import TABLES_FOLDER
from overlapscope.workers import processes
from tests.cli.command_line import overlapscope, overlapscope_process
from tests.synthetic import write_recording


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = write_recording(tmp_path / "run", ranks=2, steps=40)
    read_trace(folder)
    return folder


def copy(recording: Path, url: str) -> str:
    filesystem, place = fsspec.url_to_fs(url)
    filesystem.put(f"{recording / TABLES_FOLDER}/", f"{place}/{TABLES_FOLDER}/", recursive=True)
    return url


@pytest.fixture
def url(recording: Path) -> Iterator[str]:
    yield copy(recording, f"memory://{recording.parent.name}/run")
    fsspec.filesystem("memory").rm(f"/{recording.parent.name}", recursive=True)


@pytest.mark.parametrize("command", ["summary", "stragglers", "recommend"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_is_said_is_that_of_the_folder(recording: Path, url: str, command: str, options: tuple[str, ...]) -> None:
    here, there = (overlapscope(command, place, *options) for place in (recording, url))
    assert there.stdout.replace(url, str(recording)) == here.stdout
    assert (there.returncode, there.stderr) == (here.returncode, here.stderr) == (0, "")


def test_a_recording_at_a_url_is_compared_with_one_here(recording: Path, url: str) -> None:
    shutil.copytree(recording, copied := recording.with_name("copied"))
    here, there = (overlapscope("compare", recording, place) for place in (copied, url))
    assert there.stdout.replace(url, str(copied)) == here.stdout
    assert (there.returncode, there.stderr) == (here.returncode, here.stderr) == (0, "")


def test_a_recording_at_a_url_is_exported(recording: Path, url: str, tmp_path: Path) -> None:
    for place, file in ((recording, "here.json"), (url, "there.json")):
        assert overlapscope("export", place, "-o", tmp_path / file, "--format", "chrome").returncode == 0
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()


@pytest.mark.parametrize("place", ["memory://nothing/run", "nonsense://bucket/run", "gs://bucket/run"])
def test_where_nothing_can_be_read_the_last_line_says_so(place: str) -> None:
    ran = overlapscope("summary", place)
    assert ran.returncode != 0
    assert f" {place}: " in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("damaged", ["contents.json", "steps/0000.parquet", "ranks.parquet"])
def test_damaged_tables_are_told_and_left_alone(url: str, damaged: str) -> None:
    filesystem, place = fsspec.url_to_fs(f"{url}/{TABLES_FOLDER}/{damaged}")
    content = bytearray(filesystem.cat_file(place))
    content[len(content) // 2] ^= 0x04
    filesystem.pipe_file(place, bytes(content))
    for command in ("summary", "recommend"):
        ran = overlapscope(command, url)
        assert (ran.returncode, ran.stdout) == (1, "")
        (line,) = ran.stderr.splitlines()
        assert line.startswith(f"overlapscope {command}: {url}: its tables are damaged")
    assert filesystem.cat_file(place) == bytes(content)


def test_metrics_say_that_they_need_logs(url: str, tmp_path: Path) -> None:
    ran = overlapscope("export", url, "--format", "openmetrics", "-o", tmp_path / "metrics.txt")
    assert (ran.returncode, (tmp_path / "metrics.txt").exists()) == (1, False)
    assert ran.stderr.startswith(f"overlapscope export: {url}: openmetrics ")


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    """The environment in which an S3 server on this machine is found, with a bucket on it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("traces")
        yield environment
    server.stop()


@pytest.mark.slow
def test_a_recording_is_read_from_an_s3_server(recording: Path, bucket: dict[str, str]) -> None:
    url = copy(recording, "s3://traces/run")
    for command in ("summary", "stragglers"):
        here, there = (overlapscope_process(command, place, "--json", **bucket) for place in (recording, url))
        assert there.stdout.replace(url, str(recording)) == here.stdout
        assert (there.returncode, there.stderr) == (0, "")


@pytest.mark.nightly
def test_processes_read_their_ranges_from_an_s3_server(
    recording: Path, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a recording that does not fit into memory."""
    whole = read_trace(recording)
    for name in ("_RECORDS_PER_SHARD", "_RECORDS_PER_RANGE"):
        monkeypatch.setattr(load, name, 200)
    with processes() as workers:
        open_recording(recording, None, workers, rebuild_tables=True)
        url = copy(recording, "s3://traces/large")
        found = analyze_recording(resolve_recording_path(url), workers, None, lambda _: None)
    assert isinstance(found, ChunkedAnalysis)
    assert found.summary.steps == whole.steps["step"].nunique() - 3
