"""The figures of a step: one worked out by hand, and what belongs to which step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from overlapscope.breakdown.breakdown import compute_breakdown, tabulate_breakdown
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import Flag, Kind, Phase, pack_body
from tests.synthetic import US, make_rank, write_recording

ALL_REDUCE = pack_body(Kind.COLLECTIVE, op="all_reduce", dtype="float32", elements=8)
LAUNCH = pack_body(Kind.LAUNCH, op="all_reduce", dtype="float32", elements=8)


def record(folder: Path, *records: tuple[bytes, int, int, int]) -> Trace:
    """One rank with the given records: body, step, start and end in microseconds."""
    log = make_rank(folder, 0, world_size=1)
    for body, step, start_us, end_us in records:
        log.append(body, step, start_us * US, end_us * US)
    log.close()
    return read_trace(folder)


def figures_by_step(trace: Trace) -> pd.DataFrame:
    return tabulate_breakdown(compute_breakdown(trace))


def phase(which: Phase, flags: Flag = Flag.NONE) -> bytes:
    return pack_body(Kind.PHASE, index=which, flags=flags)


STEP = pack_body(Kind.STEP)


def test_the_synthetic_step_by_hand(tmp_path: Path) -> None:
    per_step = figures_by_step(read_trace(write_recording(tmp_path, ranks=2, steps=3)))
    assert per_step[["rank", "step"]].to_numpy().tolist() == [[r, s] for r in range(2) for s in range(3)]
    # 4000-4800, 5000-6500, 6900-8300; the last has 6900-7000 under backward, and the rest is waited for
    expected = {
        "step_time_ns": 10_000,
        "data_wait_ns": 500,
        "forward_ns": 2000,
        "inter_phase_ns": 500,
        "backward_ns": 4000 - 3 * 40,  # without the copies in
        "exposed_ns": 1300,
        "bucket_copies_ns": 3 * 40 + 200,  # and what of finalize comes after the wait
        "optimizer_ns": 1500,
        "evaluation_ns": 0,
        "compute_ns": 2000 + 3880 + 1500,
        "hidden_ns": 800 + 1500 + 100,
        "communication_ns": 800 + 1500 + 1400,
    }
    for name, microseconds in expected.items():
        assert per_step[name].tolist() == [microseconds * US] * 6, name
        assert per_step[name].dtype == np.int64, name
    assert per_step["overlap_ratio"].tolist() == [pytest.approx(2400 / 3700)] * 6


def test_without_communication_the_ratio_is_nan(tmp_path: Path) -> None:
    per_step = figures_by_step(record(tmp_path, (phase(Phase.FORWARD), 0, 0, 10), (STEP, 0, 0, 20)))
    assert per_step["communication_ns"].tolist() == [0]
    assert math.isnan(per_step["overlap_ratio"][0])


def test_collectives_that_run_at_the_same_time_count_once(tmp_path: Path) -> None:
    trace = record(
        tmp_path,
        (LAUNCH, 0, 2, 2),
        (LAUNCH, 0, 3, 3),
        (ALL_REDUCE, 0, 2, 8),
        (ALL_REDUCE, 0, 3, 10),
        (phase(Phase.BACKWARD), 0, 0, 4),
        (STEP, 0, 0, 20),
    )
    row = figures_by_step(trace).iloc[0]
    assert (row["communication_ns"], row["hidden_ns"], row["exposed_ns"]) == (8 * US, 8 * US, 0)


def test_only_what_finalize_waits_for_is_exposed(tmp_path: Path) -> None:
    trace = record(
        tmp_path,
        (LAUNCH, 0, 0, 0),
        (ALL_REDUCE, 0, 0, 25),
        (phase(Phase.DATA_WAIT), 0, 0, 10),
        (phase(Phase.FINALIZE), 0, 10, 30),
        (STEP, 0, 0, 30),
    )
    row = figures_by_step(trace).iloc[0]
    assert (row["compute_ns"], row["hidden_ns"], row["exposed_ns"]) == (0, 10 * US, 15 * US)
    assert row["bucket_copies_ns"] == 5 * US


@pytest.mark.parametrize("computing", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION])
def test_every_other_phase_hides_communication(tmp_path: Path, computing: Phase) -> None:
    trace = record(tmp_path, (LAUNCH, 0, 2, 2), (ALL_REDUCE, 0, 2, 8), (phase(computing), 0, 0, 10), (STEP, 0, 0, 10))
    row = figures_by_step(trace).iloc[0]
    assert (row["compute_ns"], row["overlap_ratio"]) == (10 * US, 1.0)


def test_both_backward_passes_of_gradient_accumulation_count(tmp_path: Path) -> None:
    trace = record(
        tmp_path,
        (phase(Phase.BACKWARD, Flag.NO_SYNC), 0, 0, 10),
        (phase(Phase.BACKWARD), 0, 20, 30),
        (STEP, 0, 0, 40),
    )
    assert figures_by_step(trace)["backward_ns"].tolist() == [20 * US]


def test_a_collective_counts_for_the_steps_in_which_it_is_under_way(tmp_path: Path) -> None:
    trace = record(
        tmp_path,
        (LAUNCH, 0, 8, 8),
        (STEP, 0, 0, 10),
        (ALL_REDUCE, 0, 8, 14),
        (phase(Phase.FORWARD), 1, 10, 20),
        (STEP, 1, 10, 20),
    )
    per_step = figures_by_step(trace)
    assert per_step["communication_ns"].tolist() == [2 * US, 4 * US]
    assert per_step["hidden_ns"].tolist() == [2 * US, 4 * US]


def test_an_unfinished_step_has_no_row_and_an_unfinished_collective_no_time(tmp_path: Path) -> None:
    trace = record(
        tmp_path,
        (LAUNCH, 0, 1, 1),
        (STEP, 0, 0, 10),
        (LAUNCH, 1, 12, 12),
        (ALL_REDUCE, 1, 12, 14),
        (phase(Phase.FORWARD), 1, 10, 20),
    )
    per_step = figures_by_step(trace)
    assert per_step["step"].tolist() == [0]
    assert per_step["communication_ns"].tolist() == [0]


def test_a_recording_without_a_finished_step_has_the_columns_and_no_row(tmp_path: Path) -> None:
    with_rows = figures_by_step(record(tmp_path / "one", (STEP, 0, 0, 10)))
    without = figures_by_step(record(tmp_path / "none", (phase(Phase.FORWARD), 0, 0, 10)))
    assert len(without) == 0
    assert list(without.columns) == list(with_rows.columns)


def test_a_step_number_occurs_on_every_rank(tmp_path: Path) -> None:
    """Rank and step together are the key: the ranks' times must not add up."""
    for rank, end_us in ((0, 4), (1, 9)):
        log = make_rank(tmp_path, rank, world_size=2)
        log.append(phase(Phase.FORWARD), 7, 0, end_us * US)
        log.append(STEP, 7, 0, 20 * US)
        log.close()
    assert figures_by_step(read_trace(tmp_path))["forward_ns"].tolist() == [4 * US, 9 * US]
