"""How much of a condition there was in spans of time, from counters, levels and events."""

from __future__ import annotations

import numpy as np
import pytest

from overlapscope.machine.conditions import KIND_OF, KINDS, Condition, measure_conditions
from overlapscope.machine.readings import SourceReadings, outside, spans_of
from overlapscope.machine.text import CONDITION_LABELS
from overlapscope.trace.machine_facts import FACTS, HW_SLOWDOWN, HW_THERMAL
from overlapscope.trace.machine_log import MachineReading
from tests.machine.said import COOL, HOT, S, counted, gpu, quota, readings


def seconds(*pairs: tuple[float, float]):
    return spans_of(*((round(begin * S), round(end * S)) for begin, end in pairs))


def condition(rows: list[MachineReading], kind: str, *pairs: tuple[float, float]) -> Condition:
    """That of the only source."""
    source = rows[0].source
    found = measure_conditions(readings(rows, {0: [source]}), seconds(*pairs))[source]
    return next(one for one in found if one.kind == kind)


def test_a_quota_counts_by_periods():
    rows = quota("cgroup a", [0, 0, 0.5, 0.5, 0, 0])
    assert condition(rows, "CPU quota", (2, 4)).amount == pytest.approx(0.5)
    assert condition(rows, "CPU quota", (0, 2)).amount == 0
    assert condition(rows, "CPU quota", (0, 6)).amount == pytest.approx(1 / 6)
    assert condition(rows, "CPU quota", (2.5, 3), (3.5, 4.5)).amount == pytest.approx(10 / 3 / 10)
    assert condition(rows, "CPU quota", (2, 4)).values == {"cpu_quota": 0.5}


def test_elsewhere_is_the_rest_of_the_recording():
    rows = quota("cgroup a", [0, 0, 0.5, 0.5, 0, 0])
    assert condition(rows, "CPU quota", (2, 4)).elsewhere == 0
    assert condition(rows, "CPU quota", (0, 2)).elsewhere == pytest.approx(0.25)
    assert condition(rows, "CPU quota", (-5, 10)).elsewhere is None


def test_a_counter_of_time_counts_what_was_not_written_because_nothing_changed():
    """The counter stood still from 1 to 9 s, of which there is no line, and then grew within a second."""
    rows = [
        *counted("process a", "queued_ns", [0, 0.5 * S]),
        MachineReading(time_ns=10 * S, since_ns=9 * S, source="process a", name="queued_ns", value=1.3 * S),
    ]
    assert condition(rows, "no core", (1, 9)).amount == 0
    assert condition(rows, "no core", (9, 10)).amount == pytest.approx(0.8)


def test_a_counter_that_begins_anew_has_counted_from_zero():
    rows = counted("ib a mlx5_0/1", "errors", [100, 103, 2])
    assert condition(rows, "InfiniBand errors", (0, 2)).amount == pytest.approx(5)


def test_another_rank_that_goes_on_sampling_has_seen_what_happened_since():
    """Its first reading has no earlier one of its own."""
    rows = [*counted("cgroup a", "oom_kills", [0, 0]), *counted("cgroup a", "oom_kills", [1], begin_s=3)]
    assert condition(rows, "killed for memory", (0, 3)).amount == pytest.approx(1)
    assert condition(rows, "killed for memory", (0, 1)).amount == 0


def test_a_clock_that_is_held_down_has_the_clock_of_these_moments():
    rows = gpu("gpu a", [COOL, COOL, HOT, HOT, COOL, COOL])
    found = condition(rows, "thermal limit", (1, 4))
    assert found.amount == pytest.approx(2 / 3)
    assert found.values == {"sm_clock_mhz": 1200, "max_sm_clock_mhz": 1980, "temperature_c": 88}
    assert found.elsewhere == 0


def test_a_hardware_slowdown_for_heat_is_one_for_heat():
    rows = gpu("gpu a", [HW_SLOWDOWN | HW_THERMAL] * 4)
    assert condition(rows, "thermal limit", (0, 4)).amount == 1
    assert condition(rows, "hardware slowdown", (0, 4)).amount == 0
    assert condition(gpu("gpu a", [HW_SLOWDOWN] * 4), "hardware slowdown", (0, 4)).amount == 1


def test_events_are_counted_and_the_latest_is_kept():
    rows = [*gpu("gpu a", [COOL] * 9), *counted("gpu a", "xid", [13, 79], begin_s=5)]
    found = condition(rows, "Xid", (0, 9))
    assert (found.amount, found.values["xid"]) == (2, 79)
    assert condition(rows, "Xid", (0, 4)).amount == 0


@pytest.mark.parametrize(("width", "amount"), [(16.0, 0.0), (8.0, 1.0)])
def test_a_link_is_narrow_if_it_uses_fewer_lanes_than_it_has(width, amount):
    rows = [*counted("gpu a", "pcie_width", [width] * 5), *counted("gpu a", "max_pcie_width", [16.0])]
    assert condition(rows, "narrow PCIe", (0, 4)).amount == amount


def test_what_was_not_read_is_unknown_and_not_zero():
    rows = counted("gpu a", "temperature_c", [60.0, 61.0])
    found = measure_conditions(readings(rows, {0: ["gpu a"]}), seconds((0, 1)))["gpu a"]
    assert {one.kind for one in found} == {"Xid", "GPU lost"}, "events that have not come are known"
    source = SourceReadings("gpu a", rows)
    assert np.isnan(KIND_OF["thermal limit"].measure_each(source, seconds((0, 1)))).all()


def test_the_share_of_each_step_is_missing_where_nothing_was_sampled():
    source = SourceReadings("cgroup a", quota("cgroup a", [1, 1, 0, 0]))
    shares = KIND_OF["CPU quota"].measure_each(source, seconds((-2, -1), (0, 1), (1, 3), (3, 4), (5, 6)))
    np.testing.assert_allclose(shares, [np.nan, 1, 0.5, 0, np.nan])


def test_the_rest_of_the_time_is_outside_of_spans_that_touch_and_overlap():
    assert outside(seconds((1, 2), (2, 3), (2.5, 4)), 0, 5 * S).T.tolist() == [[0, S], [4 * S, 5 * S]]
    assert outside(seconds((0, 5)), 0, 5 * S).size == 0


def test_each_kind_has_a_label_and_facts_that_exist():
    assert [*CONDITION_LABELS] == [kind.name for kind in KINDS]
    for kind in KINDS:
        assert {*kind.facts, *kind.levels} <= {fact.name for fact in FACTS[kind.source]}, kind.name
