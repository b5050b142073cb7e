"""What a recording says of itself at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.run_facts import RunFacts, StepTimes, read_run_facts
from dashboards.runs import summarize_run
from overlapscope.cli import recording_folder
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import JOINING_FILE, rank_folder
from tests.synthetic import make_rank, write_recording, write_step


def test_the_facts_of_a_recording_are_those_it_was_made_with(tmp_path):
    facts = read_run_facts(write_recording(tmp_path / "traces", ranks=2, world_size=4, steps=30))
    assert (facts.model, facts.ranks, facts.device, facts.steps) == ("GPT", 4, "cpu", 30)
    assert facts.started_unix_ns == 1_700_000_000_000_000_000
    assert facts.latest_step_ns == 10_000_000
    assert facts.latest == StepTimes(first=0, last=29, times_ns=(10_000_000.0,) * 30)


def test_they_are_read_while_it_is_being_recorded(tmp_path):
    log = make_rank(tmp_path / "traces", 0, world_size=1)
    assert read_run_facts(tmp_path / "traces").steps is None
    for step in range(3):
        write_step(log, step, begin_ns=1_000_000_000 + step * 10_000_000)
    assert read_run_facts(tmp_path / "traces").steps == 3


def test_steps_are_counted_from_the_first_one_that_was_recorded(tmp_path):
    log = make_rank(tmp_path / "traces", 0, world_size=1)
    for step in (59, 60):
        write_step(log, step, begin_ns=1_000_000_000 + step * 10_000_000)
    assert read_run_facts(tmp_path / "traces").steps == 2
    assert summarize_run(tmp_path / "traces").steps == 2
    recorded = recording_folder.describe(tmp_path / "traces")
    assert recorded is not None
    assert recorded.steps == 2


def test_what_is_missing_is_not_known(tmp_path):
    assert read_run_facts(tmp_path) == RunFacts()
    (tmp_path / "rank_0").mkdir()
    assert read_run_facts(tmp_path) == RunFacts(), "an empty folder is no rank"
    (tmp_path / "rank_0" / "rank.json").write_text("{}")
    assert read_run_facts(tmp_path) == RunFacts(ranks=1)


def test_damaged_files_leave_the_rest_known(tmp_path):
    folder = write_recording(tmp_path / "traces", ranks=2)
    (folder / "rank_0" / "run.json").write_text("{")
    (folder / "rank_0" / "rank.json").write_text("[]")
    facts = read_run_facts(folder)
    assert (facts.model, facts.device, facts.steps) == ("GPT", "cpu", 5)


@given(times=st.lists(st.floats(1, 1e12), min_size=1, max_size=500))
def test_a_picture_of_many_steps_keeps_their_mean_and_range(times):
    shown = StepTimes.of(0, len(times) - 1, times).times_ns
    assert len(shown) == min(len(times), 60)
    assert min(times) <= min(shown) * (1 + 1e-9)
    assert max(shown) <= max(times) * (1 + 1e-9)
    if len(times) % len(shown) == 0:
        assert np.mean(shown) == pytest.approx(np.mean(times))


def test_a_run_whose_ranks_never_all_joined_has_a_verdict(tmp_path):
    for rank in (0, 2):
        folder = rank_folder(tmp_path, rank)
        folder.mkdir()
        here = {"host": "node0", "pid": 10_000_000 + rank, "boot_id": "b", "time_ns": 1, "rank": rank, "world_size": 3}
        write_json(folder / JOINING_FILE, here)
    found = summarize_run(tmp_path)
    assert found.kind != "No verdict"
    assert found.is_fault or not found.has_enough_evidence
    assert "rank 1" in found.line.lower()
