"""Steps of loops with several models and optimizers, from hooks to records."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from tests.instrumented_ddp.recording.lone_training import backward, make_model, phases_by_step, recorded


def test_an_iteration_of_a_gan_is_one_step(traces) -> None:
    models = [make_model(traces) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(6):
        for _ in range(3):
            optimizers[0].zero_grad()
            backward(models[0])
            optimizers[0].step()
        optimizers[1].zero_grad()
        backward(models[1])
        optimizers[1].step()
    trace = recorded(models[0], traces)
    assert sorted(trace.steps["step"]) == list(range(6))
    updates = trace.phases[trace.phases["phase"] == "optimizer"].groupby("step").size()
    assert updates.to_dict() == dict.fromkeys(range(6), 4)


def test_an_iteration_with_two_forwards_before_the_first_update_is_one_step(traces) -> None:
    """And the second optimizer steps in each fifth iteration only, so for some of them it is not known."""
    generator, critic = (make_model(traces) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for iteration in range(20):
        fake = generator(torch.randn(2, 4))
        backward(critic)
        optimizers[1].step()
        if iteration % 5 == 4:
            fake.sum().backward()
            optimizers[0].step()
    assert sorted(recorded(generator, traces).steps["step"])[-1] == 19


def test_an_optimizer_that_exists_and_never_steps_delays_the_count_and_no_more(traces) -> None:
    model, other = make_model(traces), make_model(traces)
    unused = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        backward(model)
        optimizer.step()
    trace = recorded(model, traces)
    assert max(trace.steps["step"]) == 29
    assert unused.param_groups


def test_models_trained_one_after_the_other_have_a_step_for_each_iteration(traces) -> None:
    """Of a helper that is called again, frame and optimizer may be where those of before were."""

    def train() -> None:
        model = make_model(traces)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            backward(model)
            optimizer.step()

    kept = make_model(traces)
    for _ in range(12):
        train()
    backward(kept)
    assert sorted(recorded(kept, traces).steps["step"]) == list(range(60))


def test_what_an_optimizer_does_around_the_one_that_it_steps_is_a_part_of_the_update(traces) -> None:
    class Outer(torch.optim.Optimizer):  # as ZeroRedundancyOptimizer, which sends what has been updated
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self) -> None:  # type: ignore[override]
            self.inner.step()
            time.sleep(0.01)

    model = make_model(traces)
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        backward(model)
        optimizer.step()
    trace = recorded(model, traces)
    assert phases_by_step(trace)[2] == ["loop", "forward", "backward", "finalize", *3 * ["optimizer"]]
    last = trace.phases[trace.phases["phase"] == "optimizer"].groupby("step").last()
    assert (last["end_ns"] - last["start_ns"] >= 10_000_000).all()


def test_an_update_that_has_raised_is_not_the_one_around_the_next(traces) -> None:
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        backward(model)
        if step == 1:
            optimizer.param_groups[0]["lr"] = None
            with suppress(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    phases = phases_by_step(recorded(model, traces))
    assert [phases[step].count("optimizer") for step in range(3)] == [1, 2, 1]
