"""``overlapscope export``: what is written, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.cli.main import main
from overlapscope.interop import trace_viewers
from overlapscope.trace.json_files import write_json
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import EVENTS_FILE, RANK_FILE, RUN_FILE, rank_folder
from tests.cli.command_line import overlapscope
from tests.synthetic import write_recording


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "traces", ranks=3)


def test_a_trace_of_some_ranks_and_steps(traces: Path, tmp_path: Path) -> None:
    small = ("--steps", "1:2", "--ranks", "0,2")
    for format_, name, slices in (("perfetto", "a.pftrace", 42), ("chrome", "a.json", 42)):
        ran = overlapscope("export", traces, "-o", tmp_path / name, "--format", format_, *small)
        assert (ran.returncode, ran.stdout) == (0, "")
        assert ran.stderr == f"overlapscope export: {tmp_path / name}: {slices} slices of 2 ranks\n"
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}


def test_a_name_in_gz_is_compressed(traces: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json.gz"):
        assert overlapscope("export", traces, "-o", tmp_path / name, "--format", "chrome").returncode == 0
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_those_of_the_recording(traces: Path, tmp_path: Path, kind: str) -> None:
    ran = overlapscope("export", traces, "-o", tmp_path / "tables", "--format", kind)
    assert ran.returncode == 0
    names = {path.stem for path in (tmp_path / "tables").iterdir()}
    assert {"breakdown", "collectives", "phases", "plans"} <= names
    read = pd.read_csv if kind == "csv" else pd.read_parquet
    collectives = read(tmp_path / "tables" / f"collectives.{kind}")
    assert collectives["end_ns"].tolist() == read_trace(traces).collectives["end_ns"].tolist()
    again = overlapscope("export", traces, "-o", tmp_path / "tables", "--format", kind)
    assert (again.returncode, again.stderr.count("already exists")) == (1, 1)


def test_metrics_are_of_the_folders_name(traces: Path, tmp_path: Path) -> None:
    assert overlapscope("export", traces, "-o", tmp_path / "a.prom", "--format", "openmetrics").returncode == 0
    assert 'overlapscope_ranks{run="traces"} 3' in (tmp_path / "a.prom").read_text().splitlines()


def edited(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def test_a_rank_whose_clock_is_not_known_says_so_in_the_file(traces: Path, tmp_path: Path) -> None:
    edited(rank_folder(traces, 2) / RANK_FILE, boot_id="another host's")
    for rank in range(3):  # or the all-reduces would align it
        edited(
            rank_folder(traces, rank) / RUN_FILE, models=[{"model": 0, "class": "GPT", "comm_hook": "of the user's"}]
        )
    ran = overlapscope("export", traces, "-o", tmp_path / "a.json", "--format", "chrome")
    assert "note: rank 2 " in ran.stderr
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0 (node0, cpu)",
        "rank 1 (node0, cpu)",
        "rank 2 (node0, cpu, clock not aligned)",
    ]
    arrows = [event for event in events if event["ph"] in "stf"]
    assert {event["pid"] for event in arrows if event["name"] == "together"} == {0, 1}


def test_what_is_missing_is_said_beside_what_is_written(traces: Path, tmp_path: Path) -> None:
    (rank_folder(traces, 1) / EVENTS_FILE).unlink()
    ran = overlapscope("export", traces, "-o", tmp_path / "a")
    assert ran.returncode == 1
    assert "slices of 2 ranks" in ran.stderr
    assert "error: " in ran.stderr


def test_without_the_package_of_perfetto_it_is_said_how_to_get_it(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_viewers, "find_spec", lambda _: None)
    assert main(["export", str(traces), "-o", str(tmp_path / "a.pftrace")]) == 1
    assert "pip install 'overlapscope[perfetto]', or --format chrome" in capsys.readouterr().err
