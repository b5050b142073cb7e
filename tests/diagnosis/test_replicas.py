"""Replicas compared by their fingerprints: since when they differ, what does, and on which ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.diagnosis.replica_drift import (
    ComparedReplicas,
    EndComparison,
    Replica,
    compare_model_replicas,
    replica_for_snapshot,
    summarize_latest_pass,
    summarize_pass,
)
from overlapscope.trace.live_files import FINAL_PASS, FingerprintPasses, fingerprint_pass_dtype

NAMES = tuple(f"layers.{number}.weight" for number in range(7))
NUMBERS = [4_111_300_161, 73, 2_000_000_006, 901_845_452, 31_337, 5, 1_540_483_477]
EVERY = [True] * len(NAMES)

ValueAt = Callable[[int, int], int]
"""The fingerprint of a tensor after so many reductions."""


def passes(value_at: ValueAt, reductions: int, period: int, begin: int = 0) -> FingerprintPasses:
    """What a rank has taken until then: step ``k`` begins after ``k`` reductions."""
    table = np.zeros(len(range(begin, reductions, period)), fingerprint_pass_dtype(len(NAMES)))
    for row, first in zip(table, range(begin, reductions, period), strict=True):
        row["first"], row["period"] = first, period
        for tensor, number in enumerate(NUMBERS):
            moment = first + (number - first) % period
            if moment < reductions:
                row["values"][tensor], row["steps"][tensor] = value_at(moment, tensor), moment
    return table


def equal(moment: int, tensor: int) -> int:
    return 1000 * moment + tensor + 1


def differs_from(step: int, tensors: range = range(len(NAMES)), until: int = 10**6) -> ValueAt:
    """As the others' until an update in some step changes some tensors; perhaps they are made equal again."""
    return lambda moment, tensor: equal(moment, tensor) + 500 * (tensor in tensors and step < moment <= until)


def last(value_at: ValueAt, reductions: int) -> FingerprintPasses:
    """What a rank has when its recording ends after so many reductions."""
    table = passes(value_at, reductions + 1, 1, begin=reductions)
    table["period"] = FINAL_PASS
    return table


def compared(
    tables: Mapping[int, FingerprintPasses],
    kinds: Mapping[int, str] | None = None,
    last: Mapping[int, FingerprintPasses] | None = None,
) -> ComparedReplicas:
    tensors = tuple((name, (kinds or {}).get(place, "trained")) for place, name in enumerate(NAMES))
    replicas = {
        rank: Replica(
            model=0, key="a.0", class_name="Net", ranks=tuple(tables), tensors=tensors, numbers=tuple(NUMBERS)
        )
        for rank in tables
    }
    found = compare_model_replicas(replicas, tables.__getitem__, None if last is None else last.__getitem__)
    assert found is not None
    return found


@given(st.integers(0, 60), st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=3, max_size=3), st.integers(0, 2))
def test_the_step_lies_between_the_last_equal_and_the_first_other_fingerprint(
    step: int, periods: list[int], rank: int
) -> None:
    """Whatever the periods of ranks are: they have those of the longest in common."""
    faulty = differs_from(step)
    tables = {one: passes(faulty if one == rank else equal, 100, period) for one, period in enumerate(periods)}
    difference = compared(tables).difference
    assert difference is not None
    assert (difference.equal_step if difference.equal_step is not None else -1) <= step < difference.differs_step
    assert difference.differs_step - step <= max(periods)
    assert difference.sides == (tuple(one for one in range(3) if one != rank), (rank,))
    assert difference.is_at_once
    assert difference.names == NAMES


def test_fingerprints_of_all_tensors_bound_the_step_of_a_fault_in_all_of_them() -> None:
    """Each alone is taken every eighth step."""
    tables = {0: passes(equal, 100, 8), 1: passes(differs_from(41), 100, 8)}
    difference = compared(tables).difference
    assert difference is not None
    taken = sorted({number % 8 for number in NUMBERS})
    assert difference.differs_at == min(m for m in range(42, 60) if m % 8 in taken)
    assert difference.equal_at == max(m for m in range(42) if m % 8 in taken)


def test_what_has_not_been_compared_since_is_counted_until_the_end_shows_it() -> None:
    """A job of 14 reductions that differs in all since step 11, of which each is compared every eighth step."""
    faulty = differs_from(11)
    tables = {0: passes(equal, 14, 8), 1: passes(faulty, 14, 8)}
    difference = compared(tables).difference
    assert difference is not None
    assert difference.uncompared
    assert {*difference.names, *difference.uncompared} == {*NAMES}
    difference = compared(tables, last={0: last(equal, 14), 1: last(faulty, 14)}).difference
    assert difference is not None
    assert (difference.names, difference.uncompared) == (NAMES, ())
    difference = compared({0: passes(equal, 100, 8), 1: passes(differs_from(11, range(3)), 100, 8)}).difference
    assert difference is not None
    assert (difference.names, difference.uncompared) == (NAMES[:3], ()), "the others are the same"


def test_a_fault_in_one_tensor_is_bounded_by_its_own_fingerprints() -> None:
    tables = {rank: passes(differs_from(41, range(3, 4)) if rank else equal, 100, 8) for rank in range(2)}
    difference = compared(tables).difference
    assert difference is not None
    assert difference.names == (NAMES[3],)
    assert difference.differs_at - difference.equal_at == 8
    assert difference.equal_at <= 41 < difference.differs_at


def test_tensors_that_follow_later_are_named_and_bound_nothing() -> None:
    def one_by_one(moment: int, tensor: int) -> int:
        return equal(moment, tensor) + 500 * (moment > 20 + 10 * tensor)

    difference = compared({0: passes(equal, 100, 4), 1: passes(one_by_one, 100, 4)}).difference
    assert difference is not None
    assert difference.names == NAMES
    assert not difference.is_at_once
    assert difference.equal_at <= 20 < difference.differs_at <= 24


def test_what_differs_from_the_first_moment_was_never_equal() -> None:
    difference = compared({0: passes(equal, 50, 1), 1: passes(differs_from(-1), 50, 1)}).difference
    assert difference is not None
    assert (difference.equal_at, difference.equal_step, difference.differs_at) == (None, None, 0)


def test_equal_replicas_do_not_differ() -> None:
    found = compared({rank: passes(equal, 50, period) for rank, period in enumerate([1, 4, 8])})
    assert found.difference is found.was_different is None
    assert found.tensors == len(NAMES)
    assert found.latest_step > 40


def test_what_was_made_equal_again_is_no_difference_and_not_forgotten() -> None:
    found = compared({0: passes(equal, 90, 2), 1: passes(differs_from(20, until=40), 90, 2)})
    assert found.difference is None
    assert found.was_different is not None
    assert 20 < found.was_different[0] < found.was_different[1] <= 40


def test_replicas_that_are_averaged_now_and_then_are_told_apart() -> None:
    def averaged(moment: int, tensor: int) -> int:
        return equal(moment, tensor) + 500 * (moment % 16 > 3)

    difference = compared({0: passes(equal, 90, 2), 1: passes(averaged, 90, 2)}).difference
    assert difference is not None
    assert difference.was_made_equal


def test_buffers_are_compared_apart_from_parameters() -> None:
    tables = {0: passes(equal, 50, 2), 1: passes(differs_from(5, range(2, 4)), 50, 2)}
    found = compared(tables, kinds={2: "buffer", 3: "buffer"})
    assert found.difference is None
    assert found.buffers is not None
    assert found.buffers.names == NAMES[2:4]
    numbers, is_parameter = NUMBERS, [place not in (2, 3) for place in range(len(NAMES))]
    digests = {summarize_latest_pass(table[:-1], numbers, is_parameter) for table in tables.values()}
    assert len(digests) == 1


def test_nothing_is_compared_where_ranks_took_nothing_at_the_same_time() -> None:
    found = compared({0: passes(equal, 50, 2)[:5], 1: passes(differs_from(-1), 100, 2, begin=50)})
    assert (found.difference, found.moments, found.latest_step) == (None, 0, None)


@pytest.mark.parametrize("period", [1, 2, 8])
def test_neighbors_agree_in_short_at_the_longer_period(period: int) -> None:
    own, theirs = passes(equal, 64, period), passes(equal, 64, 8)
    other = passes(differs_from(30), 64, 8)
    latest = summarize_latest_pass(theirs, NUMBERS, EVERY)
    assert latest is not None
    assert summarize_pass(own, NUMBERS, EVERY, latest.first, latest.period) == latest
    assert summarize_latest_pass(other, NUMBERS, EVERY).digest != latest.digest


def test_a_card_holds_the_newest_sweeps_and_is_read_as_the_file_is() -> None:
    tensors = tuple((name, "trained") for name in NAMES)
    numbers = tuple(NUMBERS)
    replica = Replica(model=0, key="a.0", class_name="Net", ranks=(0, 1), tensors=tensors, numbers=numbers)
    table = passes(equal, 2000, 1)
    card = replica_for_snapshot(replica, table)
    assert len(card.passes) < len(table)
    held = card.table()
    assert (held[-100:] == table[-100:]).all()
    assert set(held["first"]) <= set(table["first"])
    assert held["first"][0] < 200


def test_what_only_the_last_update_has_made_different_is_seen_at_the_end() -> None:
    tables = dict.fromkeys(range(3), passes(equal, 20, 4))
    ends = {0: last(equal, 20), 1: last(differs_from(19, range(2, 4)), 20), 2: last(equal, 20)}
    found = compared(tables, last=ends)
    assert found.difference is None
    taken = [max(moment for moment in range(20) if moment % 4 == NUMBERS[tensor] % 4) for tensor in (2, 3)]
    assert found.at_end == EndComparison(differing=NAMES[2:4], sides=((0, 2), (1,)), equal_step=min(taken))


def test_ends_are_the_same_whatever_buffers_are() -> None:
    tables, ends = (
        dict.fromkeys(range(2), passes(equal, 20, 4)),
        {0: last(equal, 20), 1: last(differs_from(0, range(1)), 20)},
    )
    assert compared(tables, {0: "buffer"}, ends).at_end == EndComparison(differing=(), sides=((0, 1),))


def test_ends_after_different_numbers_of_reductions_say_nothing() -> None:
    tables = dict.fromkeys(range(2), passes(equal, 20, 4))
    assert compared(tables, last={0: last(equal, 20), 1: last(equal, 21)}).at_end is None
    assert compared(tables, last={0: last(equal, 20), 1: last(equal, 20)[:0]}).at_end is None
