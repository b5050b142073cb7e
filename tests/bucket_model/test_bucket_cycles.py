"""Records of a rank -> its cycles, whatever the records are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from overlapscope.bucket_model.observation import BucketCycles, compute_bucket_cycles
from overlapscope.trace.event_log import RECORD_DTYPE, Records
from overlapscope.trace.schema import NO_INDEX, Flag, Kind, Phase

PLANS = {1: ((3, 2), (1, 0)), 2: ((3, 2, 1, 0),)}
PARAMETERS = 4
STEPS = range(5, 9)
EPOCHS = (1, 1, 2, 2)
STEP_NS = 1000


def one_pass(step: int, epoch: int, start_ns: int) -> list[dict[str, Any]]:
    """Backward from 100 to 500; a bucket is ready each 100, copied for 10, reduced in 150, and copied back at 700."""
    rows = [
        {"kind": Kind.PHASE, "index": Phase.FORWARD, "start_ns": start_ns, "end_ns": start_ns + 100},
        {"kind": Kind.PHASE, "index": Phase.BACKWARD, "start_ns": start_ns + 100, "end_ns": start_ns + 500},
        {"kind": Kind.COLLECTIVE, "index": NO_INDEX, "start_ns": start_ns + 20, "end_ns": start_ns + 30},
    ]
    for bucket, parameters in enumerate(PLANS[epoch]):
        ready_ns = start_ns + 200 + 100 * bucket
        launch_ns = ready_ns + 10
        rows += [
            {"kind": Kind.GRADIENT_READY, "index": index, "start_ns": ready_ns - 10 * place, "end_ns": 0}
            for place, index in enumerate(reversed(parameters))
        ]
        rows += [
            {"kind": Kind.BUCKET_READY, "index": bucket, "start_ns": ready_ns, "end_ns": ready_ns},
            {"kind": Kind.COPY_IN, "index": bucket, "start_ns": ready_ns, "end_ns": launch_ns},
            {"kind": Kind.COLLECTIVE, "index": bucket, "start_ns": launch_ns, "end_ns": launch_ns + 150},
            {"kind": Kind.COPY_OUT, "index": bucket, "start_ns": start_ns + 700, "end_ns": start_ns + 720},
        ]
    return [{"step": step, "plan_epoch": epoch, **row} for row in rows]


def as_records(rows: list[dict[str, Any]]) -> Records:
    records = np.zeros(len(rows), dtype=RECORD_DTYPE)
    for record, row in zip(records, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    return records


def steps_of(epochs: tuple[int, ...] = EPOCHS) -> list[dict[str, Any]]:
    return [
        row
        for place, (step, epoch) in enumerate(zip(STEPS, epochs, strict=True))
        for row in one_pass(step, epoch, place * STEP_NS)
    ]


def cycles_in(records: Records) -> BucketCycles:
    return compute_bucket_cycles(records, 0, PLANS, STEPS[1:], PARAMETERS)


def is_same(one: BucketCycles, other: BucketCycles) -> bool:
    names = ("epoch", "previous_epoch", "moments_ns", "ready_ns", "buckets_ns")
    return all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in names)


def test_a_cycle_runs_from_the_end_of_one_step_to_that_of_the_next() -> None:
    seen = cycles_in(as_records(steps_of()))
    assert seen.is_complete.all()
    assert seen.epoch.tolist() == [1, 2, 2]
    assert seen.previous_epoch.tolist() == [1, 1, 2]
    # Steps with two buckets are over at 460, those with one at 360.
    np.testing.assert_array_equal(
        seen.moments_ns[0], [[1000, 260, 640, 400], [900, 260, 640, 400], [1000, 360, 740, 400]]
    )
    np.testing.assert_array_equal(seen.ready_ns[0], [[200, 190, 100, 90], [100, 90, 80, 70], [100, 90, 80, 70]])
    np.testing.assert_array_equal(seen.buckets_ns[0, 0], [[750, 900, 10, 20], [850, 1000, 10, 20]])
    np.testing.assert_array_equal(seen.buckets_ns[0, 2], [[850, 1000, 10, 20], [np.nan] * 4])


def test_a_backward_under_no_sync_is_not_that_of_the_step() -> None:
    rows = steps_of()
    accumulated = [{**row, "flags": Flag.NO_SYNC, "start_ns": 0} for row in rows if row["index"] == Phase.BACKWARD]
    accumulated = [row for row in accumulated if row["kind"] == Kind.PHASE]
    assert is_same(cycles_in(as_records(accumulated + rows)), cycles_in(as_records(rows)))


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("completed", [0, 1])
def test_a_step_with_two_passes_is_not_seen_though_those_of_the_second_complete_late(
    epoch: int, completed: int
) -> None:
    second = [
        row
        for row in one_pass(STEPS[1], epoch, STEP_NS + 750)
        if row["kind"] not in (Kind.COLLECTIVE, Kind.COPY_OUT) or row["index"] < completed
    ]
    assert cycles_in(as_records(steps_of() + second)).is_complete.tolist() == [False, False, True]


@given(st.randoms(use_true_random=False))
def test_the_order_of_records_is_no_matter(chance: Any) -> None:
    rows = steps_of()
    shuffled = chance.sample(rows, len(rows))
    assert is_same(cycles_in(as_records(shuffled)), cycles_in(as_records(rows)))


@given(st.data())
def test_what_was_cut_off_or_is_of_other_plans_is_not_seen_and_nothing_fails(data: st.DataObject) -> None:
    numbers = st.sampled_from([0, 1, 2, 3, 4, 17, 0xFFFF, 0xFFFFFFFF])
    rows = data.draw(st.lists(st.sampled_from(steps_of()), max_size=80))
    changed = [
        {**row, field: data.draw(numbers) % (0x10000 if field == "plan_epoch" else 2**32)}
        if (field := data.draw(st.sampled_from(["", "plan_epoch", "index"])))
        else row
        for row in rows
    ]
    seen = cycles_in(as_records(changed))
    assert seen.shape == (len(STEPS) - 1, PARAMETERS, 2)
    assert set(seen.epoch.tolist()) <= {-1, *PLANS}


@given(
    records=arrays.arrays(RECORD_DTYPE, st.integers(0, 40)),
    steps=st.lists(st.integers(0, 3), max_size=6),
)
def test_no_bytes_at_all_make_it_fail(records: Records, steps: list[int]) -> None:
    records["step"] %= 4
    records["kind"] %= max(Kind) + 1
    assert compute_bucket_cycles(records, 0, PLANS, steps, PARAMETERS).shape == (len(steps), PARAMETERS, 2)
