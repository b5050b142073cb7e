"""A recording that is analyzed range by range says what it says as a whole, to the nanosecond."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import describe_summary
from overlapscope.chunked_analysis import ChunkedAnalysis, analyze_recording
from overlapscope.errors import OverlapScopeError
from overlapscope.stragglers.cycles import Cycles
from overlapscope.trace import load
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import TABLES_FOLDER
from overlapscope.workers import SerialWorkers, processes
from tests.simulated_job import MS, Job, write_logs


def silent(_: object, __: object = None) -> None:
    pass


def in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch, records: int) -> ChunkedAnalysis:
    for name in ("_RECORDS_PER_SHARD", "_RECORDS_PER_RANGE"):
        monkeypatch.setattr(load, name, records)
    found = analyze_recording(folder, SerialWorkers(), silent, silent)
    assert isinstance(found, ChunkedAnalysis)
    return found


def assert_same(pieces: Analysis, whole: Analysis) -> None:
    pd.testing.assert_frame_equal(pieces.summary.figures, whole.summary.figures)
    assert describe_summary(pieces.summary) == describe_summary(whole.summary)
    assert pieces.summary.mean.blocks == whole.summary.mean.blocks
    assert pieces.summary.steady.excluded == whole.summary.steady.excluded
    ours, theirs = pieces.summary.job_breakdown, whole.summary.job_breakdown
    assert ours is not None
    assert theirs is not None
    assert np.array_equal(ours.ns.sum(axis=1), ours.end_ns - ours.start_ns)
    # Where nobody waits for many steps, the path stays on whichever rank it is on at their end.
    step_ns = (theirs.end_ns[-1] - theirs.start_ns[0]) / len(theirs.steps)
    meets = (theirs.path.until_ns - theirs.path.from_ns).max() < 8 * step_ns
    for name in ("steps", "start_ns", "end_ns", "ranks", *(("ns", "rank_ns") if meets else ())):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert (pieces.cycles is None) == (whole.cycles is None)
    for field in fields(Cycles) if pieces.cycles is not None else ():
        assert np.array_equal(getattr(pieces.cycles, field.name), getattr(whole.cycles, field.name)), field.name


def job_of(seed: int, ranks: int, *, broadcasts: bool) -> Job:
    random = np.random.default_rng(seed)
    job = Job(ranks=ranks, steps=40, noise=0.2, seed=seed)
    if random.integers(2):
        job.slow_down(int(random.integers(ranks)), 0.5, slice(int(random.integers(40)), None))
    job.gc = [(int(random.integers(ranks)), int(random.integers(40)), "forward", 30 * MS) for _ in range(3)]
    job.carried_over_ns += random.integers(0, MS, job.carried_over_ns.shape)
    # From jobs in which ranks wait in every step to some in which all communication is hidden and they hardly ever do.
    job.transfer_ns = (job.transfer_ns * random.uniform(0, random.choice([0.01, 1, 8]), job.transfer_ns.shape)).astype(
        int
    )
    job.ready_at = job.ready_at * random.choice([0.3, 1])
    job.broadcast_ns = MS if broadcasts else None
    return job


@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 5), broadcasts=st.booleans(), records=st.integers(150, 1400))
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_is_that_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, broadcasts: bool, records: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    write_logs(job_of(seed, ranks, broadcasts=broadcasts).run(), folder)
    whole = Analysis(read_trace(folder))
    (folder / TABLES_FOLDER).rename(folder / "earlier")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_same(in_pieces(folder, monkeypatch, records), whole)


def test_processes_come_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_logs(job_of(1, 3, broadcasts=True).run(), tmp_path / "job")
    here = in_pieces(folder, monkeypatch, 700)
    with processes() as workers:
        assert_same(analyze_recording(folder, workers, silent, silent), here)


def test_a_step_that_no_rank_finished_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = job_of(4, 2, broadcasts=False).run()
    finished = trace.steps[trace.steps["step"] < 39].reset_index(drop=True)
    folder = write_logs(replace(trace, steps=finished), tmp_path / "job")
    excluded = in_pieces(folder, monkeypatch, 700).summary.steady.excluded
    assert [each.steps for each in excluded if each.why == "unfinished"] == [(39,)]


def test_damaged_tables_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_logs(job_of(2, 3, broadcasts=False).run(), tmp_path / "job")
    first = in_pieces(folder, monkeypatch, 700)
    path = folder / TABLES_FOLDER / "collectives" / "0001.parquet"
    content = bytearray(path.read_bytes())
    for place in range(8, len(content), 97):
        content[place] ^= 0x10
    path.write_bytes(content)
    assert_same(in_pieces(folder, monkeypatch, 700), first)
    assert path.read_bytes() != content


def test_what_needs_everything_at_once_says_that_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_logs(job_of(3, 2, broadcasts=False).run(), tmp_path / "job")
    with pytest.raises(OverlapScopeError, match=f"{folder}: is too large for this"):
        _ = in_pieces(folder, monkeypatch, 500).breakdown
