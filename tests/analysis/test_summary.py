"""The sentence and its figures: which variant is said when, and what the figures are."""

from __future__ import annotations

import math
import statistics

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.analysis.summary import WARM_UP_STEPS, after_warm_up, summarise

MS = 1_000_000


def table(rows: list[dict[str, float]]) -> pd.DataFrame:
    """Rows as ``overlap_by_step`` makes them; what is not given is 0."""
    columns = ["rank", "step", "step_time_ns", "compute_ns", "communication_ns", "overlap_ns"]
    columns += [f"{phase}_ns" for phase in ("data_wait", "forward", "backward", "finalise", "optimizer", "evaluation")]
    per_step = pd.DataFrame(rows, columns=columns).fillna(0).astype("int64")
    per_step["exposed_ns"] = per_step["communication_ns"] - per_step["overlap_ns"]
    per_step["overlap_ratio"] = per_step["overlap_ns"] / per_step["communication_ns"].where(
        per_step["communication_ns"] > 0
    )
    return per_step


def alike(steps: int = 10, **milliseconds: float) -> pd.DataFrame:
    """So many equal steps of one rank, in milliseconds."""
    times = {f"{name}_ns": value * MS for name, value in milliseconds.items()}
    return table([{"rank": 0, "step": step, **times} for step in range(steps)])


def test_the_plain_case_names_what_hides_and_what_waits() -> None:
    summary = summarise(alike(step_time=48, compute=44, communication=11.1, overlap=8))
    assert summary.sentence == (
        "72 % of communication hides under compute; 3.10 ms of each 48.0 ms step (6 %) is spent waiting for it."
    )
    assert (summary.step_time_ns, summary.exposed_ns) == (48 * MS, 3_100_000)
    assert summary.overlap_ratio == pytest.approx(8 / 11.1)
    assert summary.exposed_share == pytest.approx(3.1 / 48)


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [
        ({"step_time": 48, "compute": 44}, "No communication was recorded in steps of 48.0 ms, so there is no overlap"),
        (
            {"step_time": 50, "compute": 49, "communication": 10, "overlap": 9.97},
            "99 % of communication hides under compute; only 30.0 µs of each 50.0 ms step (<1 %) is spent waiting "
            "for it, so there is little left to gain.",
        ),
        (
            {"step_time": 60, "compute": 20, "communication": 50, "overlap": 10},
            "Communication takes 50.0 ms and compute 20.0 ms, so it can't all hide: 20 % of communication hides under "
            "compute, and 40.0 ms of each 60.0 ms step (67 %) is spent waiting for it.",
        ),
        (
            {"step_time": 100, "compute": 40, "communication": 10, "overlap": 5, "data_wait": 55},
            "55.0 ms of each 100 ms step (55 %) is spent waiting for data, 5.00 ms (5 %) for communication; "
            "50 % of communication hides under compute.",
        ),
        (
            {"step_time": 100, "compute": 40, "communication": 50, "overlap": 20, "data_wait": 25},
            "Communication takes 50.0 ms and compute 40.0 ms, so it can't all hide: 40 % of communication hides under "
            "compute, and 30.0 ms of each 100 ms step (30 %) is spent waiting for it.",
        ),
    ],
    ids=["no communication", "little exposed", "bound by communication", "data", "data and yet more communication"],
)
def test_each_case_has_its_own_sentence(milliseconds: dict[str, float], said: str) -> None:
    assert summarise(alike(**milliseconds)).sentence.startswith(said)


def test_without_a_finished_step_it_says_so() -> None:
    summary = summarise(table([]))
    assert summary.sentence == "No step has finished, so there is nothing to measure yet."
    assert (summary.ranks, summary.steps_counted, summary.step_time_ns) == (0, 0, 0)
    assert math.isnan(summary.overlap_ratio)
    assert math.isnan(summary.exposed_share)


def test_slow_first_steps_do_not_count() -> None:
    steps = alike(step_time=48, compute=44, communication=11.1, overlap=8)
    steps.loc[steps["step"] < WARM_UP_STEPS, ["step_time_ns", "exposed_ns"]] = 10**12
    summary = summarise(steps)
    assert (summary.warm_up_steps_left_out, summary.steps_counted) == (3, 7)
    assert summary.step_time_ns == 48 * MS


@pytest.mark.parametrize(("steps", "left_out"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 3), (100, 3)])
def test_most_of_a_few_steps_are_always_counted(steps: int, left_out: int) -> None:
    counted, said = after_warm_up(alike(steps=steps, step_time=1))
    assert (len(counted), said) == (steps - left_out, left_out)


def test_the_same_steps_are_left_out_on_every_rank() -> None:
    """A rank whose first steps are missing does not lose the ones after them instead."""
    steps = [{"rank": 0, "step": s} for s in range(10)] + [{"rank": 1, "step": s} for s in range(3, 10)]
    counted, _ = after_warm_up(table(steps))
    assert counted.groupby("rank")["step"].min().tolist() == [3, 3]


times = st.integers(0, 10**12)


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for rank in range(draw(st.integers(1, 3))):
        for step in range(draw(st.integers(0, 9))):
            communication_ns = draw(times)
            found.append(
                {
                    "rank": rank,
                    "step": step,
                    "step_time_ns": draw(st.integers(1, 10**12)),
                    "compute_ns": draw(times),
                    "communication_ns": communication_ns,
                    "overlap_ns": draw(st.integers(0, communication_ns)),
                    "data_wait_ns": draw(times),
                }
            )
    return found


@given(rows())
def test_any_steps_give_one_sentence_and_their_medians(found: list[dict[str, float]]) -> None:
    per_step = table(found)
    summary = summarise(per_step)
    assert summary.sentence.endswith(".")
    assert "nan" not in summary.sentence
    assert "\n" not in summary.sentence
    counted, left_out = after_warm_up(per_step)
    assert left_out <= WARM_UP_STEPS
    assert len(counted) == 0 or len(set(counted["step"])) > len(set(per_step["step"])) / 2
    if len(counted):
        assert summary.step_time_ns == round(statistics.median(counted["step_time_ns"].tolist()))
        assert summary.exposed_ns == round(statistics.median(counted["exposed_ns"].tolist()))
        ratios = [ratio for ratio in counted["overlap_ratio"].tolist() if not math.isnan(ratio)]
        assert math.isnan(summary.overlap_ratio) == (not ratios)
        if ratios:
            assert summary.overlap_ratio == pytest.approx(statistics.median(ratios))


@given(rows(), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(found: list[dict[str, float]], chance: object) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert repr(summarise(table(shuffled))) == repr(summarise(table(found)))
