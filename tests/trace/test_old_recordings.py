"""Recordings of earlier versions, kept as they were written, are read and judged as they were then."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import summarize
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.recording import read_trace

DATA = Path(__file__).parents[1] / "data" / "recordings"
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))


@pytest.fixture(scope="module", params=VERSIONS)
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of a version: two ranks that trained for ten steps, and three with a fault."""
    folder = tmp_path_factory.mktemp(request.param)
    with tarfile.open(DATA / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_a_training_has_its_steps_and_their_parts(recordings: Path) -> None:
    trace = read_trace(recordings / "healthy")
    assert trace.errors == []
    assert trace.run["versions"]["overlapscope"] in VERSIONS
    assert trace.steps.groupby("rank")["step"].apply(list).to_dict() == {0: list(range(10)), 1: list(range(10))}
    summary = summarize(trace, compute_breakdown(trace))
    assert summary.ranks == 2
    assert len(summary.exposed_for) > 3


def test_a_verdict_is_what_it_was(recordings: Path) -> None:
    assert judge(read_evidence(recordings / "healthy")[0]).kind == "healthy"
    verdict = judge(read_evidence(recordings / "missing-branch")[0])
    assert (verdict.kind, verdict.blamed, verdict.step) == ("gradients never ready", (1,), 12)
