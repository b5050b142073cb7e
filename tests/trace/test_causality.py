"""No all-reduce ends before its last arrival: what follows for the clocks of the ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.clock_alignment import (
    CollectiveBounds,
    compute_fixes,
    compute_offset_bounds,
    find_worst_violation,
    group_all_reduces_by_clock,
    merge_by_clock,
    tighten_map,
)
from overlapscope.trace.clocks import MAX_DRIFT, ClockMap

US = 1_000
BEGIN_NS = 10**15


def table(arrivals_ns: np.ndarray, ends_ns: np.ndarray, buckets: int = 1) -> pd.DataFrame:
    """One rank's all-reduces, ``buckets`` a step."""
    number = np.arange(len(arrivals_ns))
    return pd.DataFrame(
        {
            "model": 0,
            "group": 0,
            "step": number // buckets,
            "bucket": number % buckets,
            "op": "all_reduce",
            "ready_ns": pd.Series(arrivals_ns - 5 * US, dtype="Int64"),
            "launch_ns": arrivals_ns,
            "start_ns": pd.Series(arrivals_ns, dtype="Int64"),
            "end_ns": pd.Series(ends_ns, dtype="Int64"),
        }
    )


def seen_by(*tables: pd.DataFrame, peers: tuple[str, ...] = ()) -> CollectiveBounds | None:
    """The first table is of the reference; the others are of ranks that share another clock."""
    names = dict(enumerate(["reference", *["other"] * (len(tables) - 1)]))
    trains_with = dict(enumerate(peers or [""] * len(tables)))
    rows = pd.concat([one.assign(rank=rank) for rank, one in enumerate(tables)], ignore_index=True)
    whole = group_all_reduces_by_clock(rows, names, trains_with)
    parts = [group_all_reduces_by_clock(part, names, trains_with) for _, part in rows.groupby("rank")]
    for name, joined in merge_by_clock(parts).items():  # however ranks are read, it is the same
        keys = ["peers", "model", "step", "bucket", "occurrence"]
        in_order = [each.sort_values(keys, ignore_index=True)[list(joined)] for each in (joined, whole[name])]
        pd.testing.assert_frame_equal(*in_order)
    return compute_offset_bounds(whole, "other", "reference")


def training(
    steps: int, *, shift_ns: int = 0, drift: float = 0.0, transfer_us: int = 200, seed: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two ranks that arrive up to 1 ms apart every 100 ms. The clock of the second is ahead by ``shift_ns``."""
    chance = np.random.default_rng(seed)
    begin_ns = BEGIN_NS + np.arange(steps) * 100_000 * US
    arrivals_ns = begin_ns + chance.integers(0, 1000, (2, steps)) * US
    ends_ns = arrivals_ns.max(axis=0) + transfer_us * US + chance.integers(0, 100, (2, steps)) * US

    def shown(ns: np.ndarray) -> np.ndarray:
        return ns + shift_ns + np.rint((ns - BEGIN_NS) * drift).astype(np.int64)

    return table(arrivals_ns[0], ends_ns[0]), table(shown(arrivals_ns[1]), shown(ends_ns[1]))


def test_an_all_reduce_bounds_the_offset_from_both_sides() -> None:
    seen = seen_by(table(np.array([100]), np.array([150])), table(np.array([1120]), np.array([1145])))
    assert seen is not None
    bounds = seen.bounds
    # The reference arrives before we end, at 1145; we arrive, at 1120, before the reference ends.
    assert (bounds.low_at_ns[0], bounds.low_ns[0]) == (1145, 100 - 1145)
    assert (bounds.high_at_ns[0], bounds.high_ns[0]) == (1120, 150 - 1120)


def test_of_several_ranks_on_a_clock_the_last_to_arrive_and_the_first_to_end_count() -> None:
    reference = table(np.array([100]), np.array([150]))
    seen = seen_by(reference, table(np.array([90]), np.array([148])), table(np.array([110]), np.array([160])))
    assert seen is not None
    assert (seen.bounds.low_ns[0], seen.bounds.high_ns[0]) == (100 - 148, 150 - 110)


def test_all_reduces_that_only_one_clock_has_say_nothing() -> None:
    one, other = table(np.array([100]), np.array([150])), table(np.array([100]), np.array([150]))
    assert seen_by(one, other.assign(step=7)) is None
    assert seen_by(one, other.assign(op="broadcast")) is None
    assert seen_by(one, other.assign(group=1)) is None
    assert seen_by(one, other.assign(end_ns=pd.Series([pd.NA], dtype="Int64"))) is None
    assert seen_by(one, other, peers=("[0, 1]", "[2, 3]")) is None, "replicas that do not train together"


def test_a_bucket_that_is_reduced_twice_in_a_step_is_matched_turn_by_turn() -> None:
    twice = table(np.array([100, 300]), np.array([150, 350])).assign(step=0)
    seen = seen_by(twice, twice)
    assert seen is not None
    assert seen.bounds.low_ns.tolist() == [-50, -50]


@given(
    st.integers(-(10**13), 10**13),
    st.floats(-MAX_DRIFT / 2, MAX_DRIFT / 2),
    st.integers(1, 300),
    st.integers(1, 3000),
    st.integers(0, 100),
)
def test_without_pings_the_true_offset_lies_within_the_error(
    shift_ns: int, drift: float, steps: int, transfer_us: int, seed: int
) -> None:
    reference, other = training(steps, shift_ns=shift_ns, drift=drift, transfer_us=transfer_us, seed=seed)
    seen = seen_by(reference, other)
    assert seen is not None
    clock = ClockMap.from_fixes(compute_fixes(seen))
    for column in ("launch_ns", "end_ns"):
        own_ns = other[column].to_numpy(dtype=np.int64)
        true_ns = BEGIN_NS + np.rint((own_ns - shift_ns - BEGIN_NS) / (1 + drift))
        assert (np.abs(clock(own_ns) - true_ns) <= clock.error_at(own_ns) + 1).all()


def test_all_reduces_of_which_ranks_have_numbered_the_steps_differently_align_nothing() -> None:
    reference, other = training(50)
    skewed = other.assign(step=np.where(other["step"] < 25, other["step"], other["step"] + 1))
    seen = seen_by(reference, skewed)
    assert seen is not None
    assert compute_fixes(seen) == []


def test_an_error_that_is_wider_than_the_all_reduces_is_held_within_them() -> None:
    reference, other = training(100, transfer_us=50)
    seen = seen_by(reference, other)
    assert seen is not None
    slow_network = ClockMap.constant(3000 * US, 5000.0 * US)
    assert find_worst_violation(slow_network, seen) is None
    clock = tighten_map(slow_network, compute_fixes(seen))
    own_ns = other["launch_ns"].to_numpy()
    assert clock.error_at(own_ns).max() < 1000 * US
    assert (np.abs(clock.offset_at(own_ns)) <= clock.error_at(own_ns)).all(), "the true offset is 0"


def test_all_reduces_that_are_wider_than_the_error_change_nothing() -> None:
    reference, other = training(100)
    seen = seen_by(reference, other)
    assert seen is not None
    clock = tighten_map(ClockMap.constant(3 * US, 10.0 * US), compute_fixes(seen))
    own_ns = other["launch_ns"].to_numpy()
    assert set(clock.offset_at(own_ns)) == {3 * US}
    assert set(clock.error_at(own_ns)) == {10.0 * US}


def test_the_worst_contradiction_is_named() -> None:
    reference, other = training(20, transfer_us=100)
    seen = seen_by(reference, other)
    assert seen is not None
    found = find_worst_violation(ClockMap.constant(5000 * US, 100.0 * US), seen)
    assert found is not None
    latest_ns = int((other["launch_ns"] + 5000 * US - 100 * US - reference["end_ns"]).max())
    assert found.early_ns == pytest.approx(latest_ns, abs=1)
    row = (other["launch_ns"] - reference["end_ns"]).argmax()
    assert (found.step, found.bucket) == (row, 0)
