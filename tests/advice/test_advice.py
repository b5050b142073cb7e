"""Predicting other numbers of ranks: with as many as there are it is what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.advice.advice import predict_step_times
from overlapscope.analysis import Analysis
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_recording


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    folder = write_recording(tmp_path_factory.mktemp("ranks") / "traces", ranks=2, steps=30)
    return Analysis(read_trace(folder))


def test_with_as_many_ranks_it_is_the_step_that_was_measured(analysis: Analysis):
    assert predict_step_times(analysis, [2]) == pytest.approx([analysis.summary.mean.step.value])


def test_more_ranks_take_no_less_time(analysis: Analysis):
    steps_ns = predict_step_times(analysis, [2, 3, 4, 16, 256])
    assert steps_ns == sorted(steps_ns)
    assert steps_ns[-1] > steps_ns[0]


def test_a_single_rank_tells_nothing_of_others(tmp_path: Path):
    alone = Analysis(read_trace(write_recording(tmp_path / "traces", ranks=1, steps=30)))
    with pytest.raises(OverlapScopeError):
        predict_step_times(alone, [2])
