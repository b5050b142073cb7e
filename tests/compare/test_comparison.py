"""Two recordings, two ranges of steps, two plans: what differs, and that it adds up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.waits import REASONS
from overlapscope.compare.changes import Change
from overlapscope.compare.comparison import Comparison, compare
from overlapscope.compare.side import PARTS, ComparisonSide, StepChoice, plans_to_compare
from overlapscope.compare.text import describe_outcomes
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.trace.recording import NEIGHBOR_STEPS, read_trace
from tests.compare.jobs import MS, side_of, trace_of
from tests.synthetic import write_straggling_recording


def compared(**new: object) -> Comparison:
    """A new recording, against one in which nothing was changed."""
    return compare(side_of(trace_of(path="base")), side_of(trace_of(seed=1, path="new", **new)))  # type: ignore[arg-type]


def test_the_differences_of_the_blocks_add_up_to_that_of_the_step() -> None:
    found = compared(forward_ms=4.5, transfer_ms=(2, 3.4))
    blocks = sum(found.changes[name].mean.ns.value for name in BLOCKS)
    reasons = sum(found.changes[f"exposed_{reason}"].mean.ns.value for reason in REASONS)
    assert blocks == pytest.approx(found.step.mean.ns.value)
    assert reasons == pytest.approx(found.changes["exposed"].mean.ns.value)
    assert found.job is not None
    assert sum(each.mean.ns.value for each in found.job.values()) == pytest.approx(found.step.mean.ns.value)
    assert tuple(found.changes) == PARTS


def test_both_sides_are_what_summary_says_of_them() -> None:
    base, new = trace_of(path="base"), trace_of(seed=1, path="new", forward_ms=5)
    found = compare(side_of(base), side_of(new))
    for trace, side in ((base, "base"), (new, "new")):
        mean = Analysis(trace).summary.mean
        assert getattr(found.step.mean, side) == mean.step.value
        assert {name: getattr(found.changes[name].mean, side) for name in BLOCKS} == {
            name: block.value for name, block in mean.blocks.items()
        }


def test_what_takes_longer_is_named_with_how_sure_that_is(golden: Callable[[str, str], None]) -> None:
    found = compared(forward_ms=4.4)
    assert found.outcome("step", 0.0) == found.outcome("forward", 0.0) == "slower"
    assert found.outcome("exposed", 0.0) == "no difference seen"
    assert found.step.mean.ns.low < 0.4 * MS < found.step.mean.ns.high
    golden("comparisons/slower", "\n".join(describe_outcomes(found, ["step", "forward"], 0.0)))


def test_the_blocks_that_differ_are_named_with_the_numbers_of_the_table(golden: Callable[[str, str], None]) -> None:
    found = compared(forward_ms=4.4)
    longer = replace(found.changes["forward"].mean, noise=Interval(value=4e5, low=1e5, high=7e5))
    surer = replace(longer, noise=Interval(value=5e5, low=4e5, high=6e5))
    found.changes["forward"] = Change(mean=longer, middle=surer)
    in_mean = describe_outcomes(found, ["step"], 0.0)
    could_be_chance = replace(longer, noise=Interval(value=4e5, low=-1e5, high=9e5))
    found.changes["forward"] = Change(mean=could_be_chance, middle=surer)
    golden("comparisons/blocks", "\n".join([*in_mean, *describe_outcomes(found, ["step"], 0.0)]))


def test_what_is_quicker_is_no_regression(golden: Callable[[str, str], None]) -> None:
    found = compared(forward_ms=3)
    assert found.outcome("step", 0.0) == "faster"
    golden("comparisons/faster", describe_outcomes(found, ["step"], 0.0)[0])


def test_the_whole_interval_has_to_be_above_what_may_fail(golden: Callable[[str, str], None]) -> None:
    found = compared(forward_ms=4.4)
    low = found.share(max(found.step.mean.ns.low, found.step.middle.ns.low))
    assert found.outcome("step", low * 0.999) == "slower"
    assert found.outcome("step", low * 1.001) == "slower, but not surely enough"
    golden("comparisons/allowed", describe_outcomes(found, ["step"], 0.035)[0])


def test_what_the_mean_and_the_middle_say_of_each_other_is_told(golden: Callable[[str, str], None]) -> None:
    found = compared(forward_ms={step: 10 if step % 13 == 5 else 4.2 for step in range(40)})
    said = describe_outcomes(found, ["forward"], 0.0)
    assert found.changes["forward"].most_significant is found.changes["forward"].middle
    contradicting = replace(
        found.step,
        mean=replace(found.step.mean, noise=Interval(value=-2e6, low=-3e6, high=-1e6)),
        middle=replace(found.step.middle, noise=Interval(value=2e6, low=1e6, high=3e6)),
    )
    found.changes["step"] = contradicting
    assert found.outcome("step", 0.0) == "slower"
    golden("comparisons/contradicting", "\n".join([*said, *describe_outcomes(found, ["step"], 0.0)]))


def test_where_nothing_differs_it_says_how_much_would_have_been_seen(golden: Callable[[str, str], None]) -> None:
    found = compared()
    assert found.outcome("step", 0.0) == "no difference seen"
    golden("comparisons/no_difference", "\n".join(describe_outcomes(found, ["step", "exposed"], 0.0)))


def test_a_large_difference_that_may_be_chance_is_not_called_none(golden: Callable[[str, str], None]) -> None:
    found = compared(forward_ms=4.4)
    vague = Interval(value=288e6, low=-500e6, high=1076e6)
    found.changes["step"] = Change(
        mean=replace(found.step.mean, noise=vague), middle=replace(found.step.middle, noise=vague)
    )
    assert found.outcome("step", 0.0) == "too noisy to tell"
    golden("comparisons/noisy", describe_outcomes(found, ["step"], 0.0)[0])
    unknown = replace(vague, low=math.nan, high=math.nan)
    found.changes["step"] = Change(
        mean=replace(found.step.mean, noise=unknown), middle=replace(found.step.middle, noise=unknown)
    )
    assert found.outcome("step", 0.0) == "too noisy to tell"


def test_two_ranges_of_one_recording_are_compared() -> None:
    trace = trace_of(60, forward_ms=dict.fromkeys(range(30, 60), 6))
    found = compare(side_of(trace, StepChoice(first=3, end=30)), side_of(trace, StepChoice(first=30)))
    assert (found.base.steps.tolist(), found.new.steps.tolist()) == ([*range(3, 30)], [*range(30, 60)])
    assert found.changes["forward"].mean.ns.value == pytest.approx(2 * MS, rel=0.05)
    assert [pair.new_step - pair.base_step for pair in found.steps] == [27] * 5
    assert found.settings == ()


def test_a_range_has_no_warm_up_of_its_own() -> None:
    trace = trace_of(60)
    assert side_of(trace, StepChoice(first=20, end=30)).steps.tolist() == [*range(20, 30)]
    assert side_of(trace, StepChoice(end=12)).steps.tolist() == [*range(3, 12)]


def test_two_plans_of_one_recording_are_compared() -> None:
    trace = trace_of(60, forward_ms=dict.fromkeys(range(3, 60, 2), 5), plan_of_step=dict.fromkeys(range(3, 60, 2), 1))
    found = compare(side_of(trace, StepChoice(plan=0)), side_of(trace, StepChoice(plan=1)))
    assert (found.base.steps % 2).max() == 0
    assert (found.new.steps % 2).min() == 1
    assert found.changes["forward"].mean.ns.value == pytest.approx(1 * MS, rel=0.05)


def test_plans_of_a_few_steps_are_none_to_compare() -> None:
    steps_of_plans = dict.fromkeys(range(10, 17), 1) | dict.fromkeys(range(20, 28), 2)
    assert plans_to_compare(trace_of(60, plan_of_step=steps_of_plans)) == (0, 2)
    assert plans_to_compare(trace_of(5)) == ()


def test_too_few_steps_are_refused(golden: Callable[[str, str], None]) -> None:
    said = []
    for choice in (StepChoice(first=35), StepChoice(end=3), StepChoice(plan=7)):
        with pytest.raises(OverlapScopeError, match="made-up") as error:
            side_of(trace_of(), choice)
        said.append(str(error.value))
    golden("comparisons/too_few_steps", "\n".join(said))


def test_nothing_is_compared_with_itself() -> None:
    trace = trace_of()
    with pytest.raises(OverlapScopeError, match="the same steps"):
        compare(side_of(trace), side_of(trace))


def test_buckets_of_the_same_plan_are_compared_one_by_one() -> None:
    found = compared(transfer_ms=(2, 4))
    assert [(each.base, each.new) for each in found.buckets] == [((0,), (0,)), ((1,), (1,))]
    transfers = [each.transfer for each in found.buckets]
    assert [each and each.mean.ns.value for each in transfers] == pytest.approx([0, 1 * MS])
    exposed = [each.exposed.mean.ns.value for each in found.buckets]
    assert sum(exposed) == pytest.approx(found.changes["exposed"].mean.ns.value)


def test_buckets_of_other_plans_are_compared_by_their_parameters() -> None:
    found = compared(plan=((("a",), 4), (("b",), 4), (("c",), 4)), transfer_ms=(1, 1, 3))
    assert [(each.base, each.new) for each in found.buckets] == [((0,), (0, 1)), ((1,), (2,))]
    assert [(each.base_bytes, each.new_bytes) for each in found.buckets] == [(8, 8), (4, 4)]
    assert sum(each.exposed.mean.new for each in found.buckets) == pytest.approx(found.changes["exposed"].mean.new)


def test_buckets_that_only_one_side_has_are_there() -> None:
    found = compared(plan=((("a", "b"), 8), (("d",), 4)))
    assert [(each.base, each.new) for each in found.buckets] == [((0,), (0,)), ((1,), ()), ((), (1,))]


def test_the_steps_that_differ_most_come_first_with_the_block_that_makes_them() -> None:
    found = compared(forward_ms={20: 9, 25: 7})
    assert [(pair.base_step, pair.new_step, pair.block) for pair in found.steps[:2]] == [
        (20, 20, "forward"),
        (25, 25, "forward"),
    ]
    assert found.steps[0].new_ns - found.steps[0].base_ns == pytest.approx(5 * MS, rel=0.1)


def test_settings_that_differ_are_listed_and_other_jobs_called_so(golden: Callable[[str, str], None]) -> None:
    base, new = trace_of(path="base"), trace_of(path="new", seed=1, plan=((("a", "b"), 8), (("d",), 4)))
    base.run["versions"], new.run["versions"] = {"torch": "2.12"}, {"torch": "2.13"}
    new.run["environment"] = {"NCCL_DEBUG": "INFO"}
    found = compare(side_of(base), side_of(replace(new, run=new.run | {"world_size": 4})))
    assert {(each.name, each.base, each.new) for each in found.settings} == {
        ("world_size", "2", "4"),
        ("torch", "2.12", "2.13"),
        ("NCCL_DEBUG", "not set", "INFO"),
    }
    golden("comparisons/other_job", "\n".join(found.unlike))


def test_steps_consist_of_the_same_whether_or_not_all_others_were_read(tmp_path: Path) -> None:
    folder = write_straggling_recording(tmp_path, late_us=lambda rank, step: 100 * rank + 7 * (step % 5), steps=90)
    whole, some = (read_trace(folder, steps=steps, neighbors=NEIGHBOR_STEPS) for steps in ((0, 90), (40, 60)))
    assert len(some.steps) < len(whole.steps)
    sides = [ComparisonSide.of(Analysis(trace), StepChoice(first=40, end=60)) for trace in (whole, some)]
    for of_whole, of_some in (
        [side.parts_ns() for side in sides],
        [side.job_ns() for side in sides],
    ):
        assert of_whole is not None
        assert of_some is not None
        for part, ns in of_whole.items():
            np.testing.assert_array_equal(of_some[part], ns, err_msg=part)
