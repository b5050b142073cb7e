"""What the model is told of a recording, for recordings in which everything is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapscope.advice.observations import MAX_RANKS, extract_observations, get_backend_lanes
from overlapscope.bucket_model.fit import fit_model
from overlapscope.bucket_model.schedule import replay
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import Trace
from tests.simulated_job import BUCKET_BYTES, MS, Job

WEIGHTS_PER_BUCKET = 2
FIRST = 2
"""The first step of which there is a cycle."""


def planned(trace: Trace, *, model: int = 0, dtypes: tuple[str, ...] = ("float32",) * 4) -> Trace:
    """The recording with its one plan: two gradients a bucket, numbered from the model's last parameter on."""
    rows = []
    number = WEIGHTS_PER_BUCKET * len(BUCKET_BYTES)
    for bucket, size in enumerate(BUCKET_BYTES):
        for position in range(WEIGHTS_PER_BUCKET):
            number -= 1
            name = f"layers.{number}"
            rows.append((model, 0, "plan", bucket, position, number, name, "8", size // 8, dtypes[bucket], size // 2))
    columns = ["model", "plan_epoch", "plan_hash", "bucket", "position"]
    columns += ["parameter", "name", "shape", "elements", "dtype", "bytes"]
    return replace(trace, plans=pd.DataFrame(rows, columns=columns))


def with_gradients(trace: Trace) -> Trace:
    """And when each gradient is ready: the second one of a bucket with the bucket, the first one 1 ms before."""
    reduced = trace.collectives[trace.collectives["bucket"] >= 0]
    rows = []
    for position in range(WEIGHTS_PER_BUCKET):
        ready_ns = reduced["ready_ns"].astype("int64") - MS * (WEIGHTS_PER_BUCKET - 1 - position)
        parameter = WEIGHTS_PER_BUCKET * len(BUCKET_BYTES) - 1 - (WEIGHTS_PER_BUCKET * reduced["bucket"] + position)
        rows.append(reduced[["rank", "model", "step", "plan_epoch"]].assign(parameter=parameter, ready_ns=ready_ns))
    return replace(trace, gradients=pd.concat(rows, ignore_index=True))


def recording(job: Job) -> Trace:
    return with_gradients(planned(job.run()))


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), ranks=st.integers(2, 5), noise=st.floats(0, 0.3))
def test_everything_that_is_recorded_arrives(seed: int, ranks: int, noise: float) -> None:
    job = Job(ranks=ranks, steps=8, noise=noise, seed=seed)
    seen = extract_observations(recording(job))
    assert seen.steps.tolist() == list(range(FIRST, 8))
    assert (seen.world_size, seen.ranks.tolist(), seen.has_common_clock) == (ranks, list(range(ranks)), True)
    np.testing.assert_array_equal(seen.cycle_ns, np.repeat(job.cycle_times_ns[1:, None], ranks, axis=1))
    local_ns = sum(job.local_ns[phase] for phase in ("finalize", "optimizer", "data_wait", "forward", "inter_phase"))
    np.testing.assert_array_equal(seen.backward_start_ns, local_ns[FIRST:])
    np.testing.assert_array_equal(seen.backward_end_ns, job.local_ns["backward"][FIRST:])
    at_share = (job.local_ns["backward"][FIRST:, :, None] * job.ready_at).astype(np.int64)
    np.testing.assert_array_equal(seen.ready_ns[:, :, [6, 4, 2, 0]], at_share)
    assert seen.gradients.order.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert seen.gradients.bytes.tolist() == [size // 2 for size in reversed(BUCKET_BYTES) for _ in range(2)]
    assert seen.gradients.names[7] == "layers.7"
    assert seen.plans == (((7, 6), (5, 4), (3, 2), (1, 0)),)
    assert (seen.plan == 0).all()
    assert (seen.previous_plan == 0).all()
    ends_ns = seen.collectives.end_ns.reshape(6, 4, ranks)
    np.testing.assert_array_equal(ends_ns[:, -1, 0], seen.cycle_ns[:, 0])
    last_ns = seen.collectives.launch_ns.max(axis=1)
    np.testing.assert_array_equal(seen.collectives.transfer_ns, seen.collectives.end_ns[:, 0] - last_ns)
    assert (seen.copies_out_ns == 0).all()


@pytest.mark.parametrize("has_gradients", [True, False])
def test_the_recorded_plan_replayed_gives_the_recorded_cycles(has_gradients: bool) -> None:
    job = Job(ranks=3, steps=12)
    job.transfer_ns[:] = np.array([2, 5, 5, 3]) * MS
    seen = extract_observations(recording(job) if has_gradients else planned(job.run()))
    fitted = fit_model(seen, lanes=1)
    replayed = replay(seen.plans, fitted.work, fitted.costs)
    np.testing.assert_allclose(replayed.cycle_ns[0], job.cycle_times_ns[1:], rtol=0.01)


def test_without_gradients_the_last_one_of_each_bucket_is_ready_with_the_bucket() -> None:
    trace = recording(Job(steps=5))
    known = extract_observations(trace).ready_ns
    seen = extract_observations(replace(trace, gradients=trace.gradients.iloc[:0])).ready_ns
    np.testing.assert_array_equal(seen[:, :, ::2], known[:, :, ::2])
    assert np.isnan(seen[:, :, 1::2]).all()


def test_of_many_ranks_those_stay_that_others_wait_for() -> None:
    job = Job(ranks=20, steps=20, noise=0.01)
    for rank in (5, 17):
        job.slow_down(rank, share=0.3)
    seen = extract_observations(recording(job))
    assert len(seen.ranks) == MAX_RANKS
    assert {5, 17} <= set(seen.ranks.tolist())
    assert seen.world_size == 20


def test_where_clocks_cannot_be_compared_each_rank_is_on_its_own() -> None:
    """Transfers are then the shortest of all ranks: that of the one which came last."""
    job = Job(ranks=3, steps=6, noise=0.1)
    trace = recording(job)
    known = extract_observations(trace)
    seen = extract_observations(_on_another_clock(trace, rank=1, offset_ns=12_345_678_900))
    assert not seen.has_common_clock
    np.testing.assert_array_equal(seen.collectives.transfer_ns, known.collectives.transfer_ns)
    np.testing.assert_array_equal(seen.cycle_ns, known.cycle_ns)
    np.testing.assert_array_equal(seen.ready_ns, known.ready_ns)
    np.testing.assert_array_equal(seen.backward_start_ns, known.backward_start_ns)


def test_an_end_that_one_rank_saw_late_is_when_the_other_one_saw_it() -> None:
    trace = recording(Job(ranks=2, steps=6))
    known = extract_observations(trace)
    of_rank = trace.collectives["rank"] == 1
    collectives = trace.collectives.assign(
        end_ns=trace.collectives["end_ns"] + np.where(of_rank, 7 * MS, 0),
        end_uncertainty_ns=np.where(of_rank, 9 * MS, 0),
    )
    seen = extract_observations(replace(trace, collectives=collectives))
    np.testing.assert_array_equal(seen.collectives.end_ns, known.collectives.end_ns)
    np.testing.assert_array_equal(seen.collectives.transfer_ns, known.collectives.transfer_ns)
    np.testing.assert_array_equal(seen.cycle_ns, known.cycle_ns)


def test_an_end_that_really_was_later_stays_so() -> None:
    trace = recording(Job(ranks=2, steps=6))
    later = np.where(trace.collectives["rank"] == 1, 7 * MS, 0)
    collectives = trace.collectives.assign(end_ns=trace.collectives["end_ns"] + later, end_uncertainty_ns=2 * MS)
    seen = extract_observations(replace(trace, collectives=collectives)).collectives
    np.testing.assert_array_equal(seen.end_ns[:, 1] - seen.end_ns[:, 0], 5 * MS)


def test_passes_that_are_not_reduced_are_part_of_the_time_until_the_last_backward_begins() -> None:
    trace = recording(Job(steps=6))
    known = extract_observations(trace)
    backward = trace.phases[trace.phases["phase"] == "backward"]
    unreduced = backward.assign(
        no_sync=True, start_ns=backward["start_ns"] - 8 * MS, end_ns=backward["start_ns"] - 3 * MS
    )
    seen = extract_observations(replace(trace, phases=pd.concat([trace.phases, unreduced])))
    np.testing.assert_array_equal(seen.backward_start_ns, known.backward_start_ns)
    np.testing.assert_array_equal(seen.ready_ns, known.ready_ns)


def test_a_step_that_one_rank_did_not_finish_is_left_out_with_the_one_after_it() -> None:
    trace = recording(Job(steps=10))
    table = trace.collectives
    torn = (table["step"] == 5) & (table["rank"] == 1) & (table["bucket"] == 2)
    seen = extract_observations(replace(trace, collectives=table[~torn]))
    assert seen.steps.tolist() == [2, 3, 4, 7, 8, 9]


@pytest.mark.parametrize(("every", "used"), [(3, [3, 6, 9]), (5, [2, 3, 4, 5, 6, 7, 8, 9])])
def test_light_steps_are_used_only_if_there_are_too_few_others(every: int, used: list[int]) -> None:
    trace = recording(Job(steps=10))
    steps = trace.steps.assign(is_light=trace.steps["step"] % every != 0)
    assert extract_observations(replace(trace, steps=steps)).steps.tolist() == used


def test_steps_with_another_plan_are_told_apart() -> None:
    trace = recording(Job(steps=10))
    is_late = trace.collectives["step"] >= 6
    other = trace.plans.assign(plan_epoch=1, bucket=trace.plans["bucket"])
    other["position"] = 1 - other["position"]  # the two gradients of a bucket change places
    changed = replace(
        trace,
        plans=pd.concat([trace.plans, other], ignore_index=True),
        collectives=trace.collectives.assign(plan_epoch=np.where(is_late, 1, 0)),
    )
    seen = extract_observations(changed)
    assert seen.plans == (((7, 6), (5, 4), (3, 2), (1, 0)), ((6, 7), (4, 5), (2, 3), (0, 1)))
    assert seen.plan.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert seen.previous_plan.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_gradients_of_two_types_are_ordered_by_when_they_are_ready() -> None:
    trace = with_gradients(planned(Job(steps=6).run(), dtypes=("float32", "bfloat16", "float32", "bfloat16")))
    # Buckets are launched in another order than their types are ready in.
    later = trace.gradients["parameter"].isin([7, 6])
    late = trace.gradients.assign(ready_ns=trace.gradients["ready_ns"] + np.where(later, 7 * MS, 0))
    seen = extract_observations(replace(trace, gradients=late)).gradients
    assert seen.order.tolist() == [5, 4, 7, 6, 3, 2, 1, 0]
    assert seen.kinds.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_on_a_device_a_bucket_arrives_once_it_is_copied_though_the_host_launched_it_before() -> None:
    trace = recording(Job(steps=6))
    table = trace.collectives
    copies = table[["rank", "model", "step", "plan_epoch", "bucket"]].assign(
        direction="in", start_ns=table["ready_ns"].astype("int64"), end_ns=table["ready_ns"].astype("int64") + MS // 2
    )
    early = table.assign(launch_ns=table["launch_ns"] - 15 * MS)
    known = extract_observations(trace).collectives
    seen = extract_observations(replace(trace, collectives=early, copies=copies))
    np.testing.assert_array_equal(seen.collectives.launch_ns, known.launch_ns + MS // 2)
    np.testing.assert_array_equal(seen.collectives.transfer_ns, known.transfer_ns - MS // 2)
    assert (seen.copies_in.time_ns == MS // 2).all()
    assert set(seen.copies_in.bytes) == set(BUCKET_BYTES)


def test_copies_back_belong_to_the_cycle_after_their_step() -> None:
    trace = recording(Job(steps=6))
    table = trace.collectives[trace.collectives["bucket"] == 3]
    over_ns = table["end_ns"].astype("int64")
    copies = table[["rank", "model", "step", "plan_epoch", "bucket"]].assign(
        direction="out", start_ns=over_ns, end_ns=over_ns + MS // 4
    )
    seen = extract_observations(replace(trace, copies=copies))
    assert (seen.copies_out_ns == MS // 4).all()
    assert (seen.copies_out.time_ns == MS // 4).all()


def test_of_two_models_the_one_that_reduces_more_is_looked_at() -> None:
    trace = recording(Job(steps=6))
    small = trace.collectives.assign(model=1, bytes=1000)
    seen = extract_observations(replace(trace, collectives=pd.concat([small, trace.collectives], ignore_index=True)))
    assert seen.collectives.bytes.max() == max(BUCKET_BYTES)


def test_it_may_be_the_second_one_though_phases_belong_to_no_model() -> None:
    trace = recording(Job(steps=6))
    known = extract_observations(trace)
    second = {name: getattr(trace, name).assign(model=1) for name in ("plans", "gradients", "collectives")}
    seen = extract_observations(replace(trace, **second))
    np.testing.assert_array_equal(seen.ready_ns, known.ready_ns)
    np.testing.assert_array_equal(seen.cycle_ns, known.cycle_ns)


def test_gloo_reduces_two_buckets_at_a_time() -> None:
    trace = Job(steps=3).run()
    assert get_backend_lanes(trace) == 2
    assert get_backend_lanes(replace(trace, run={"backend": "nccl"})) == 1


def _two_ranks(**changes: object) -> Trace:
    return replace(recording(Job(ranks=2, steps=6)), **changes)  # type: ignore[arg-type]


def test_what_is_missing_is_said_in_a_sentence(golden: Callable[[str, str], None]) -> None:
    hook = {"world_size": 2, "models": [{"model": 0, "comm_hook": "powerSGD_hook"}]}
    said = []
    for trace in (
        planned(Job(ranks=1, steps=6).run()),
        _two_ranks(plans=_two_ranks().plans.iloc[:0]),
        _two_ranks(collectives=_two_ranks().collectives.iloc[:0]),
        recording(Job(ranks=2, steps=4)),
        _two_ranks(collectives=pd.concat([_two_ranks().collectives] * 2, ignore_index=True)),
        _two_ranks(run=hook),
        _two_ranks(run={"world_size": 2}, ranks=_two_ranks().ranks.iloc[:1]),
    ):
        with pytest.raises(OverlapScopeError) as raised:
            extract_observations(trace)
        said.append(str(raised.value))
    golden("sentences/missing_observations", "\n".join(said))


def _on_another_clock(trace: Trace, rank: int, offset_ns: int) -> Trace:
    def moved(table: pd.DataFrame) -> pd.DataFrame:
        names = [name for name in ("start_ns", "end_ns", "ready_ns", "launch_ns") if name in table]
        off = np.where(table["rank"] == rank, offset_ns, 0)
        return table.assign(**{name: table[name] + off for name in names})

    tables = {name: moved(getattr(trace, name)) for name in ("steps", "phases", "gradients", "copies", "collectives")}
    clock = np.where(trace.ranks["rank"] == rank, "none", "same boot")
    return replace(trace, ranks=trace.ranks.assign(clock=clock), **tables)
