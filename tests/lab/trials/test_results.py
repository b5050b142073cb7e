"""Results: kept after every trial, not mixed with others, and never in place of something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.results import RESULTS_FILE, Results, find_results, read_results
from tests.lab.experiments.rows import CONDITIONS, trial


def test_what_was_added_is_there_for_the_next_run(tmp_path: Path):
    first = Results(tmp_path / "breakdown")
    first.add(trial(0), CONDITIONS, {"step_ns": 5.0, "steps_ns": [4.0, 6.0]})
    again = Results(tmp_path / "breakdown")
    assert again.done == {trial(0).key}
    again.add(trial(1), CONDITIONS, {"step_ns": 7.0, "steps_ns": [7.0]})
    table = read_results(tmp_path / "breakdown")
    assert table["step_ns"].tolist() == [5.0, 7.0]
    assert [list(steps) for steps in table["steps_ns"]] == [[4.0, 6.0], [7.0]]
    assert table["model"].tolist() == ["convnet", "convnet"]


def test_a_trial_that_failed_is_done_again_and_its_row_replaced(tmp_path: Path):
    results = Results(tmp_path)
    results.add(trial(0), CONDITIONS, {}, "out of memory")
    assert results.done == frozenset()
    assert read_results(tmp_path)["failure"].tolist() == ["out of memory"]
    results.add(trial(0), CONDITIONS, {"step_ns": 5.0})
    assert results.done == {trial(0).key}
    assert read_results(tmp_path)["failure"].tolist() == [""]


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(OverlapScopeError, match="something else than results"):
        Results(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "breakdown").touch()
    with pytest.raises(OverlapScopeError, match="holds something else"):
        Results(tmp_path / "breakdown")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hosts": ("other", "host1")}, "with hosts"),
        ({"device": "NVIDIA H100"}, "with device"),
        ({"versions": {"torch": "2.10"}}, "with versions"),
        ({"link_bytes_per_s": 1.2e9}, "over links that carried 114 MB/s, and these carry 1.12 GB/s"),
        ({"link_bytes_per_s": 1.2e7}, "over links that carried 114 MB/s, and these carry 11.4 MB/s"),
    ],
)
def test_results_of_other_conditions_are_not_mixed(tmp_path: Path, changed, said):
    results = Results(tmp_path)
    results.add(trial(0), CONDITIONS, {"step_ns": 5.0})
    results = Results(tmp_path)
    results.check(CONDITIONS)
    results.check(replace(CONDITIONS, link_bytes_per_s=1.5e8, link_latency_ns=9e5))  # they vary from moment to moment
    with pytest.raises(OverlapScopeError, match=said):
        results.check(replace(CONDITIONS, **changed))


@pytest.mark.parametrize("content", [b"", b"not parquet"])
def test_damaged_results_are_one_sentence(tmp_path: Path, content: bytes):
    (tmp_path / RESULTS_FILE).write_bytes(content)
    with pytest.raises(OverlapScopeError, match="can't be read"):
        read_results(tmp_path)


def test_a_foreign_table_is_one_sentence(tmp_path: Path):
    pd.DataFrame({"price": [1.0]}).to_parquet(tmp_path / RESULTS_FILE)
    with pytest.raises(OverlapScopeError, match="no column trial"):
        read_results(tmp_path)


def test_experiments_are_found_in_their_folder_and_above(tmp_path: Path):
    for name in ("breakdown", "scaling"):
        Results(tmp_path / name).add(trial(0), CONDITIONS, {"step_ns": 5.0})
    both = [tmp_path / "breakdown", tmp_path / "scaling"]
    assert find_results([tmp_path]) == both
    assert find_results([tmp_path / "scaling"]) == both[1:]
    assert find_results([tmp_path, tmp_path / "scaling", tmp_path / "nothing"]) == both
