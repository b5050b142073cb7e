"""Which all-reduce a round belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dashboards.recording import Rounds
from overlapscope.trace.recording import Trace, read_trace
from tests.segments import ROUNDS, write_ring_recording
from tests.synthetic import US


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return read_trace(write_ring_recording(tmp_path))


def test_every_round_belongs_to_the_all_reduce_of_its_bucket_and_step(trace: Trace) -> None:
    table = Rounds(trace).table
    all_reduces = trace.collectives.iloc[table["row"]]
    for column in ("rank", "step", "bucket"):
        assert table[column].tolist() == all_reduces[column].tolist()
    assert (all_reduces["launch_ns"].to_numpy() <= table["start_ns"].to_numpy()).all()
    assert (table["end_ns"].to_numpy() <= all_reduces["end_ns"].to_numpy(dtype="int64")).all()


def test_of_a_bucket_that_is_reduced_twice_in_a_step_each_sum_has_its_own_rounds(trace: Trace) -> None:
    apart_ns = 2_000 * US
    times = {"start_ns", "end_ns", "launch_ns", "ready_ns"}

    def twice(table: pd.DataFrame) -> pd.DataFrame:
        later = table.assign(**{name: table[name] + apart_ns for name in times & set(table)})
        return pd.concat([table, later], ignore_index=True)

    other = replace(trace, collectives=twice(trace.collectives), segments=twice(trace.segments))
    table = Rounds(other).table
    half = len(trace.segments)
    assert table["row"][half:].tolist() == (table["row"][:half] + len(trace.collectives)).tolist()
    later = Rounds(other).of(int(table["row"].iloc[-1]))
    assert later.index.tolist() == [
        index
        for rank in (0, 1)
        for index in range(half, 2 * half)
        if (table.loc[index, ["rank", "step"]] == [rank, 2]).all()
    ]


def test_of_an_all_reduce_the_rounds_on_all_ranks_are_found(trace: Trace) -> None:
    rounds = Rounds(trace)
    found = rounds.of(int(rounds.table["row"].iloc[0]))
    assert found[["rank", "step", "phase"]].to_numpy().tolist() == [
        [rank, 0, phase] for rank in (0, 1) for phase, _, _ in ROUNDS
    ]
    other_bucket = int((trace.collectives["bucket"] == 1).argmax())
    assert rounds.of(other_bucket).empty


@pytest.mark.parametrize(
    ("from_us", "to_us", "phases"),
    [(0, 4050, []), (4200, 4320, ["reduce-scatter"]), (4299, 4351, ["reduce-scatter", "all-gather"])],
)
def test_what_is_in_view_is_what_touches_it(trace: Trace, from_us: int, to_us: int, phases: list[str]) -> None:
    begin_ns = 1_000_000_000
    found = Rounds(trace).in_view(1, begin_ns + from_us * US, begin_ns + to_us * US)
    assert found["phase"].tolist() == phases
    assert set(found["rank"]) <= {1}
