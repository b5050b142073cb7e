"""Recordings of jobs that never ran are recordings like any other, and what is in them is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from overlapscope.analysis import Analysis
from overlapscope.lab.synth import estimate_bytes, write_recording
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import EVENTS_FILE, HEADER_BYTES
from tests.cli.command_line import overlapscope


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "job"
    write_recording(folder, ranks=20, steps=100, buckets=6)
    return folder


def test_nothing_is_wrong_with_it(recording: Path) -> None:
    trace = read_trace(recording)
    assert trace.problems == ()
    assert trace.aligned_ranks == tuple(range(20))
    assert trace.ranks["clock"].value_counts().to_dict() == {"same boot": 8, "pings": 12}
    assert trace.steps["step"].nunique() == 100
    assert len(trace.collectives) == 20 * 100 * 6


def test_it_is_as_large_as_was_said(recording: Path) -> None:
    logs = [path.stat().st_size - HEADER_BYTES for path in recording.glob(f"*/{EVENTS_FILE}")]
    assert sum(logs) == estimate_bytes(ranks=20, steps=100, buckets=6)


def test_buckets_are_reduced_one_after_the_other_once_the_last_rank_is_there(recording: Path) -> None:
    matched = Analysis(read_trace(recording)).breakdown.matched
    ends_ns, last_arrival_ns = matched.end_ns.min(axis=1), matched.arrival_ns.max(axis=1)
    error_ns = matched.clock_error_ns
    assert (ends_ns > last_arrival_ns - error_ns).all()
    of_step = matched.step[1:] == matched.step[:-1]
    assert (np.diff(ends_ns)[of_step] > 0).all()


def test_the_rank_that_computes_longer_is_named(recording: Path) -> None:
    stragglers = Analysis(read_trace(recording)).stragglers
    assert stragglers is not None
    assert stragglers.findings[0].ranks == (6,)
    assert stragglers.findings[0].cause == "compute"


def test_it_says_that_it_is_made_up(recording: Path) -> None:
    imported = json.loads((recording / "rank_0" / "run.json").read_text())["imported"]
    assert imported == {"from": "overlapscope lab synth", "notes": ["Made up: no such job ever ran."]}


def test_the_command_writes_one_and_says_what_to_do_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "planned"
    ran = overlapscope("lab", "synth", "--ranks", 3, "--steps", 8, "--buckets", 2, "-o", folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"{folder}: 3 ranks, 8 steps, 25.5 kB\n  overlapscope summary {folder}\n"
    assert read_trace(folder).steps["rank"].nunique() == 3


def test_an_earlier_recording_is_not_overwritten(recording: Path) -> None:
    ran = overlapscope("lab", "synth", "-o", recording)
    assert ran.returncode == 1
    assert "already holds a recording" in ran.stderr


def test_more_than_the_disk_holds_is_one_line(tmp_path: Path) -> None:
    ran = overlapscope("lab", "synth", "--ranks", 10**6, "--steps", 10**6, "-o", tmp_path / "planned")
    assert ran.returncode == 1
    assert "are free; ask for less" in ran.stderr
    assert not list((tmp_path / "planned").iterdir())
