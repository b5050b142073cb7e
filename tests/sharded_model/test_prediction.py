"""Other settings are predicted as a simulation has them that shares no code with the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapscope.advice.sharded import advise_on_sharding, describe_model
from overlapscope.advice.sharded_times import extract_step_times
from overlapscope.analysis import Analysis
from overlapscope.errors import OverlapScopeError
from overlapscope.sharded_model.model import Part, Settings, ShardedModel, Unit, merge_all, merge_units, with_prefetch
from overlapscope.sharded_model.program import build_program
from overlapscope.sharded_model.schedule import simulate
from overlapscope.sharded_model.times import LATENCY_SAVED
from overlapscope.trace.recording import Trace
from tests.sharded_model.ticking import MS, TickingJob, make_default, mean_ms


@st.composite
def jobs(draw: st.DrawFn) -> TickingJob:
    """Jobs of 2 to 4 units and 2 or 3 ranks; with one unit, nothing divides its backward from the root's."""
    count, ranks = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    names = ["", *(f"block.{number}" for number in range(count))]
    sizes = draw(st.lists(st.integers(1, 6), min_size=count + 1, max_size=count + 1))
    model = ShardedModel(
        parts=tuple(
            Part(name=name, gather_bytes=size, reduce_bytes=size) for name, size in zip(names, sizes, strict=True)
        ),
        has_root=True,
    )
    times = st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks)
    segments = {(during, index): draw(times) for during in ("forward", "backward") for index in range(count + 2)}
    return TickingJob(
        model=model,
        compute_ms=segments,
        alpha_ms=draw(st.integers(0, 5)),
        beta_ms_per_byte=draw(st.integers(1, 3)),
        ranks=ranks,
        steps=8,
    )


def settings_of(count: int) -> list[Settings]:
    """Settings of some units: several of each kind."""
    default, kept = make_default(count), make_default(count, reshards=False)
    asynchronous = [replace(with_prefetch(default, depth), is_async=True) for depth in (1, 2)]
    return [default, kept, *asynchronous, replace(with_prefetch(kept, 1), is_async=True), with_prefetch(default, 2)]


def predict_ms(trace: Trace, other: Settings) -> float:
    """The predicted mean step."""
    analysis = Analysis(trace)
    model, recorded, buckets = describe_model(trace)
    times, _ = extract_step_times(analysis, model, recorded, buckets)
    return mean_ms(simulate(times, build_program(model, other), other))


@settings(max_examples=15)
@given(jobs(), st.integers(0, 5))
def test_settings_that_are_recorded_take_as_long_as_they_did(job: TickingJob, number: int) -> None:
    own = settings_of(len(job.model.inner))[number]
    ends = job.run_step(own)
    assert predict_ms(job.record(own), own) == pytest.approx(sum(ends) / len(ends), abs=0.01)


@settings(max_examples=15)
@given(jobs(), st.integers(0, 5))
def test_other_settings_are_predicted_from_a_recording_with_the_default(job: TickingJob, number: int) -> None:
    default, other = make_default(len(job.model.inner)), settings_of(len(job.model.inner))[number]
    ends = job.run_step(other)
    assert predict_ms(job.record(default), other) == pytest.approx(sum(ends) / len(ends), abs=0.01)


def make_job(*, alpha_ms: int = 8, beta_ms_per_byte: int = 2) -> TickingJob:
    """Four units and a small root."""
    parts = tuple(
        Part(name=f"block.{number}" if number else "", gather_bytes=size, reduce_bytes=size)
        for number, size in enumerate((2, 10, 8, 10, 12))
    )
    segments = {(during, index): [20, 20] for during in ("forward", "backward") for index in range(6)}
    model = ShardedModel(parts=parts, has_root=True)
    return TickingJob(model=model, compute_ms=segments, alpha_ms=alpha_ms, beta_ms_per_byte=beta_ms_per_byte)


class HalfSaved(TickingJob):
    """A job in which only a part of the latency is saved where one collective replaces several."""

    def transfer_ms(self, unit: Unit, kind: str) -> int:
        """How long a collective takes once all ranks are there."""
        kept_ms = (1 - LATENCY_SAVED) * self.alpha_ms * (len(unit) - 1)
        return super().transfer_ms(unit, kind) + round(kept_ms)


@pytest.mark.parametrize("other", [merge_units(make_default(4), 2), merge_all(make_default(4))])
def test_fewer_and_larger_collectives_save_a_part_of_their_latency(other: Settings) -> None:
    job = make_job()
    expected_ms = HalfSaved(**vars(job)).run_step(other)[0]
    assert predict_ms(job.record(make_default(4)), other) == pytest.approx(expected_ms, abs=0.01)


def test_what_larger_collectives_gain_is_in_an_interval_from_no_latency_saved_to_all_of_it() -> None:
    job = make_job()
    recorded_ms = job.run_step(make_default(4))[0]
    advice = advise_on_sharding(Analysis(job.record(make_default(4))))
    for change in advice.changes:
        if change.kind in ("wrap", "whole"):
            all_saved = 1 - job.run_step(change.settings)[0] / recorded_ms
            assert change.gain.low < 2 * change.gain.value - all_saved < all_saved <= change.gain.high + 1e-4


def test_what_runs_at_the_same_time_for_the_first_time_gains_less_than_on_free_hardware() -> None:
    job = make_job()
    recorded_ms = job.run_step(make_default(4))[0]
    advice = advise_on_sharding(Analysis(job.record(make_default(4))))
    for change in advice.changes:
        if change.kind == "async" and change.depth == 1:
            free = 1 - job.run_step(change.settings)[0] / recorded_ms
            assert change.gain.low < change.gain.value < free <= change.gain.high + 1e-4


def test_advice_names_what_gains_most_with_its_memory() -> None:
    job = make_job()
    advice = advise_on_sharding(Analysis(job.record(make_default(4))))
    recorded_ms = job.run_step(make_default(4))[0]
    assert advice.replayed_ns == pytest.approx(recorded_ms * MS, rel=1e-4)
    best = advice.best
    assert best is not None
    assert best.gain.low <= best.gain.value <= best.gain.high
    kept = next(change for change in advice.changes if change.kind == "reshard")
    assert kept.extra_bytes == 42 - (2 + 12 + 10)
    saved_ms = recorded_ms - job.run_step(kept.settings)[0]
    assert kept.gain.value == pytest.approx(saved_ms / recorded_ms, abs=1e-4)
    assert {change.kind for change in advice.changes} == {"async", "reshard", "wrap", "whole"}
    costs_ms = [unit.reduce_ns / MS for unit in advice.exposed]
    assert costs_ms == pytest.approx([8 + 2 * size for size in (2, 10, 8, 10, 12)], abs=0.01)


def test_settings_are_kept_where_nothing_is_to_be_gained() -> None:
    job = make_job(alpha_ms=0, beta_ms_per_byte=0)
    assert advise_on_sharding(Analysis(job.record(make_default(4)))).best is None


def test_steps_in_another_order_than_the_settings_say_are_refused() -> None:
    """As with checkpointed activations, whose parameters are gathered again."""
    trace = make_job().record(make_default(4))
    again = trace.collectives[(trace.collectives["bucket"] == 0) & (trace.collectives["op"] == "all_gather")]
    fewer = trace.collectives.drop(again.index[1::2])
    with pytest.raises(OverlapScopeError, match="too few"):
        advise_on_sharding(Analysis(replace(trace, collectives=fewer.reset_index(drop=True))))
