"""The true offset lies in the error bar: for any shift, drift and asymmetric delay, between bursts and beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.clocks import MAX_DRIFT, ClockMap, Fix, bounds_from_pings, compute_fix, drop_poor_fixes

SECOND = 1_000_000_000
BOOT_NS = 10**15
"""A machine that has been up for twelve days."""

shifts_ns = st.integers(-(10**15), 10**15)
drifts = st.floats(-MAX_DRIFT / 2, MAX_DRIFT / 2)
delays_ns = st.integers(1_000, 3_000_000)
pings_of_a_burst = st.lists(st.tuples(delays_ns, delays_ns, st.integers(0, 100_000)), min_size=1, max_size=10)


class TrueClocks:
    """Two clocks whose relation is known."""

    def __init__(self, shift_ns: int, drift: float) -> None:
        self.shift_ns = shift_ns
        self.drift = drift

    def reference_ns(self, own_ns: np.ndarray) -> np.ndarray:
        return own_ns + self.shift_ns + np.rint((own_ns - BOOT_NS) * self.drift).astype(np.int64)

    def burst(self, begin_ns: int, pings: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Pings, each with its way there, its way back and a pause after it."""
        made, now_ns = [], begin_ns
        for there_ns, back_ns, pause_ns in pings:
            answered_ns = int(self.reference_ns(np.array(now_ns + there_ns)))
            made.append((now_ns, answered_ns, now_ns + there_ns + back_ns))
            now_ns += there_ns + back_ns + pause_ns
        return made

    def map_by(self, bursts: list[tuple[int, list[tuple[int, int, int]]]]) -> ClockMap:
        fixes = [compute_fix(bounds_from_pings(self.burst(BOOT_NS + begin_ns, pings))) for begin_ns, pings in bursts]
        return ClockMap.from_fixes([found for found in fixes if found is not None])


clocks = st.builds(TrueClocks, shifts_ns, drifts)
bursts = st.lists(st.tuples(st.integers(0, 3600 * SECOND), pings_of_a_burst), min_size=1, max_size=6)


@given(clocks, bursts)
def test_the_true_time_lies_within_the_error_everywhere(clocks: TrueClocks, bursts) -> None:
    clock = clocks.map_by(bursts)
    own_ns = np.linspace(BOOT_NS - 600 * SECOND, BOOT_NS + 4200 * SECOND, 200).astype(np.int64)
    assert (np.abs(clock(own_ns) - clocks.reference_ns(own_ns)) <= clock.error_at(own_ns)).all()


@given(clocks, clocks, bursts, bursts)
def test_errors_add_up_along_a_chain_of_clocks(first: TrueClocks, second: TrueClocks, to_first, to_second) -> None:
    """Two hosts that have both asked a third one's clock."""
    between = first.map_by(to_first).compose(second.map_by(to_second).inverse())
    own_ns = np.linspace(BOOT_NS, BOOT_NS + 3600 * SECOND, 50).astype(np.int64)
    there_ns = between(own_ns)
    error_ns = between.error_at(own_ns)
    # What the second clock shows is right if the third agrees; 1 + drift is what an error on the way is worth there.
    off_ns = np.abs(second.reference_ns(there_ns) - first.reference_ns(own_ns))
    assert (off_ns <= error_ns * (1 + MAX_DRIFT) + 2).all()


@given(clocks, bursts)
def test_a_map_and_its_inverse_lead_back(clocks: TrueClocks, bursts) -> None:
    clock = clocks.map_by(bursts)
    own_ns = np.linspace(BOOT_NS, BOOT_NS + 3600 * SECOND, 50).astype(np.int64)
    assert np.abs(clock.inverse()(clock(own_ns)) - own_ns).max() <= 2


def test_one_way_that_is_slower_than_the_other_is_within_the_error_of_the_round_trip() -> None:
    found = compute_fix(bounds_from_pings([(1000, 51_000 + 900, 2000)]))
    assert found is not None
    assert [found.low_ns, found.high_ns] == pytest.approx([49_900, 50_900], abs=1)


def test_pings_with_opposite_asymmetry_together_are_better_than_each_alone() -> None:
    slow_there, slow_back = (0, 50_900, 1000), (1000, 51_100, 2000)
    found = compute_fix(bounds_from_pings([slow_there, slow_back]))
    assert found is not None
    assert found.high_ns - found.low_ns < 220


def test_pings_that_contradict_each_other_are_no_fix() -> None:
    assert compute_fix(bounds_from_pings([(0, 50_000, 1000), (2000, 99_000, 3000)])) is None


def test_without_a_fix_there_is_no_map() -> None:
    with pytest.raises(ValueError, match="no fix"):
        ClockMap.from_fixes([])


def a_fix(second: float, offset_ns: int, error_ns: int = 10_000) -> Fix:
    return Fix(own_ns=round(second * SECOND), low_ns=offset_ns - error_ns, high_ns=offset_ns + error_ns)


def test_a_burst_in_a_busy_moment_is_left_to_its_neighbors() -> None:
    good, poor = [a_fix(0, 0), a_fix(60, 0), a_fix(120, 0)], a_fix(90, 400_000, error_ns=500_000)
    assert drop_poor_fixes([*good, poor]) == good
    assert drop_poor_fixes([good[0], poor]) == [good[0], poor], "of two, both are needed to know the drift"


def test_beyond_the_last_burst_the_error_grows() -> None:
    clock = ClockMap.from_fixes([a_fix(0, 0), a_fix(60, 600_000)])
    at_end, later, much_later = clock.error_at([60 * SECOND, 70 * SECOND, 600 * SECOND])
    assert at_end < later < much_later
    assert clock.offset_at(120 * SECOND) == pytest.approx(1_200_000, abs=1000)


def test_after_a_single_burst_clocks_may_drift_as_much_as_clocks_do() -> None:
    clock = ClockMap.from_fixes([a_fix(0, 0)])
    assert clock.error_at(10 * SECOND) == pytest.approx(10_000 + 10 * SECOND * MAX_DRIFT, rel=0.01)


def test_a_drift_that_changes_widens_the_error_between_bursts() -> None:
    steady = ClockMap.from_fixes([a_fix(0, 0), a_fix(60, 600_000), a_fix(120, 1_200_000)])
    changing = ClockMap.from_fixes([a_fix(0, 0), a_fix(60, 600_000), a_fix(120, 2_400_000)])
    assert changing.error_at(30 * SECOND) > 10 * steady.error_at(30 * SECOND)


def test_the_error_over_a_stretch_is_the_greatest_in_it() -> None:
    clock = ClockMap.from_fixes([a_fix(0, 0), a_fix(1, 0, error_ns=90_000), a_fix(2, 0)])
    assert clock.error_over(0, 2 * SECOND) == pytest.approx(90_001)


def test_times_stay_whole_and_exact_where_float64_would_not_do() -> None:
    clock = ClockMap.constant(1, 0.0)
    late_ns = 2**62 + 1
    assert clock(np.array([late_ns])).tolist() == [late_ns + 1]
