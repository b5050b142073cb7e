"""Gradients that are not finite: what is noted of them before they are reduced, and whether they did harm."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import pytest
import torch
from torch import nn

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec
from instrumented_ddp.recording import finite_check
from instrumented_ddp.recording.finite_check import GradientCheck
from overlapscope.diagnosis.evidence import NonFiniteGradients

HOST = torch.device("cpu")
SHAPES = {"stem.weight": (6, 4), "stem.bias": (6,), "head.weight": (3, 6), "scale": ()}
BUCKETS = ((3, 2), (1, 0))


class Job:
    """One rank's passes: gradients and weights are ones unless a test changes them.

    Args:
        dtype: of the gradients.
        max_share: maximum share of the steps' time that looks take.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, max_share: float = 1e9) -> None:
        self.found: Sequence[NonFiniteGradients] = ()
        self.writes = 0
        self.parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES.values()]
        self.specs = tuple(
            ParameterSpec(name=name, shape=shape, dtype=dtype, device=HOST, elements=one.numel())
            for (name, shape), one in zip(SHAPES.items(), self.parameters, strict=True)
        )
        self.check = GradientCheck(0, self.parameters, self.write)
        self.check._account.max_share = max_share
        self.check.adopt(BucketPlan(self.specs, BUCKETS))
        self.buffers = [torch.ones(sum(self.specs[index].elements for index in one), dtype=dtype) for one in BUCKETS]
        self.step = 0

    def write(self, model: int, found: Sequence[NonFiniteGradients]) -> None:
        assert model == 0
        self.found, self.writes = tuple(found), self.writes + 1

    def run(self, value: float = 1.0, bucket: int = 0, places: slice = slice(None), batch: float = 1.0) -> None:
        given = torch.full((2,), batch)
        self.check.on_forward_start((given,), {})
        for number, buffer in enumerate(self.buffers):
            buffer.fill_(1.0)
            if number == bucket:
                buffer[places] = value
            self.check.on_launch(number, buffer, self.step)
        self.check.on_reduced(self.step)
        self.step += 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_the_step_the_bucket_and_the_parameters_are_noted(dtype: torch.dtype, value: float) -> None:
    job = Job(dtype)
    job.run()
    job.run(torch.finfo(dtype).max)
    assert not job.found
    job.run(value, bucket=1, places=slice(0, 6))
    (one,) = job.found
    assert (one.step, one.bucket, one.parameters, one.tensors) == (2, 1, ("stem.bias",), 1)
    assert one.has_nan == (value != value)
    assert not one.is_used


@pytest.mark.parametrize("places", [slice(6, 10), slice(7, 30, 4), slice(26, 30)])
def test_a_row_or_column_is_seen_within_the_passes_that_a_diagonal_takes(places: slice) -> None:
    job = Job()
    for _ in range(6):
        job.run(nan, bucket=1, places=places)
    assert job.found[0].parameters == ("stem.weight",)
    assert job.found[0].step < 6


def test_all_parameters_of_all_buckets_of_the_step_are_named_in_the_order_of_the_buckets() -> None:
    job = Job()
    for buffer in job.buffers:
        buffer.fill_(nan)
    for number, buffer in enumerate(job.buffers):
        job.check.on_launch(number, buffer, 0)
    assert job.found[0].parameters == ("scale", "head.weight", "stem.bias", "stem.weight")
    assert (job.found[0].bucket, job.found[0].tensors) == (0, 4)


def test_an_update_that_was_left_out_is_no_use_and_the_episode_ends() -> None:
    job = Job()
    job.run(inf)
    job.run(inf)
    job.run()
    job.run(nan)
    assert [(one.step, one.last_step, one.is_used) for one in job.found] == [(0, 1, False), (3, None, False)]


def test_weights_that_were_finite_before_and_are_not_after_it_have_used_it() -> None:
    job = Job()
    job.run(nan, bucket=1, places=slice(0, 6))
    with torch.no_grad():
        job.parameters[1].fill_(nan)
    assert not job.found[0].is_used
    job.run()
    assert (job.found[0].weights_before, job.found[0].weights_after) == ((), ("stem.bias",))


def test_the_end_of_the_recording_looks_at_the_weights_too() -> None:
    job = Job()
    job.run(nan)
    with torch.no_grad():
        job.parameters[3].fill_(nan)
    job.check.close()
    assert job.found[0].weights_after == ("scale",)


def test_weights_that_were_wrong_before_are_said_to_be() -> None:
    job = Job()
    with torch.no_grad():
        job.parameters[2].view(-1)[5] = inf
    job.run(nan)
    assert job.found[0].weights_before == ("head.weight",)
    assert job.found[0].is_used


def test_a_batch_that_is_not_finite_is_noted() -> None:
    job = Job()
    for step, batch in enumerate((nan, 1.0)):
        given = torch.full((2,), batch)
        job.check.on_forward_start((), {"inputs": given})
        for number, value in enumerate((nan, 1.0)):
            job.check.on_launch(number, job.buffers[number].fill_(value), 2 * step)
        job.check.on_reduced(2 * step)
        job.check.on_forward_start((), {})
        job.check.on_launch(0, job.buffers[0].fill_(1.0), 2 * step + 1)
        job.check.on_reduced(2 * step + 1)
    assert [one.is_batch_finite for one in job.found] == [False, True]


def test_a_scaler_that_overflows_for_ever_is_not_described_for_ever_but_harm_still_is() -> None:
    job = Job()
    for _ in range(100):
        job.run(inf)
        job.run()
    writes = job.writes
    job.run(inf)
    job.run()
    assert len(job.found) == 16
    assert job.writes == writes
    for _ in range(3):
        job.run(nan)
        with torch.no_grad():
            job.parameters[0].fill_(nan)
    assert (job.found[-1].step, job.found[-1].weights_after) == (202, ("stem.weight",))


@pytest.mark.parametrize("buffer", [torch.full((5,), nan), torch.full((38,), nan)[::2], torch.ones(19).long()])
def test_a_buffer_of_another_size_or_kind_is_left_alone(buffer: torch.Tensor) -> None:
    job = Job()
    job.check.on_launch(0, buffer, 0)
    assert not job.found


DEAR = 1e-9
"""Share of the steps' time that no look keeps to."""


def run_until_found(job: Job, value: float, bucket: int = 0) -> NonFiniteGradients:
    while not job.found:
        job.run(value, bucket)
    return job.found[-1]


def test_where_looks_are_dear_the_first_steps_are_looked_at_and_then_few() -> None:
    job, looks = Job(max_share=DEAR), []
    for one in job.check._buckets:
        one.is_finite = lambda *_: looks.append(job.step) or True  # type: ignore[method-assign]
    for _ in range(10_000):
        job.run()
    assert sorted({*range(16), *looks}) == sorted({*looks})
    assert looks.count(looks[-1]) == 2
    assert {step % 4096 for step in looks if step >= 16} == {0}


def test_steps_that_were_skipped_are_noted_with_those_that_were_finite() -> None:
    job = Job(max_share=DEAR)
    for _ in range(20):
        job.run()
    one = run_until_found(job, nan)
    assert (one.step % 4096, one.unseen_since_step, one.earliest_step) == (0, 16, 16)
    assert one.finite_steps == tuple(range(16))
    job.run(nan)
    job.run(nan)
    job.run()
    assert (job.found[0].step, job.found[0].last_step) == (one.step, one.step + 2)


def test_where_no_step_was_skipped_the_first_one_is_exact() -> None:
    job = Job(max_share=DEAR)
    for _ in range(10):
        job.run()
    job.run(nan)
    assert (job.found[0].step, job.found[0].unseen_since_step, job.found[0].earliest_step) == (10, None, 10)
    assert job.found[0].finite_steps == tuple(range(10))


def test_looks_that_are_cheap_are_taken_in_each_step() -> None:
    job = Job()
    for _ in range(100):
        job.run()
    one = run_until_found(job, nan)
    assert (one.step, one.unseen_since_step) == (100, None)


def test_models_share_the_budget() -> None:
    job = Job()
    job.check.share_budget(4)
    assert job.check._account.max_share == finite_check._MAX_COST_SHARE / 4


def test_harm_that_was_done_in_skipped_steps_is_not_taken_for_that_of_the_step_in_which_it_is_seen() -> None:
    """Also if so much has been found already that no more is described at once."""
    job = Job()
    for _ in range(16):
        job.run(inf)
        job.run()
    job.check._account.max_share = DEAR
    for _ in range(20):
        job.run()
    with torch.no_grad():
        job.parameters[0].fill_(nan)
    while len(job.found) == 16:
        job.run(nan)
    assert (job.found[-1].weights_before, job.found[-1].weights_after) == (("stem.weight",), ())
    assert job.found[-1].unseen_since_step is not None
