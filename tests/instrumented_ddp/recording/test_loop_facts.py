"""What a loop does with gradients and data, as it is recorded for a comparison with other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from instrumented_ddp.collectives.user_reductions import GradientReader, UserReductions
from instrumented_ddp.recording.batch_hashes import BatchHashes
from instrumented_ddp.recording.loop_facts import LoopFactsWriter, ModelLoop
from overlapscope.diagnosis.loop_facts import LoopFacts, MicroBatches, RepeatedReductions, UnheldParameters
from overlapscope.trace.json_files import read_dataclasses
from overlapscope.trace.schema import LOOP_FACTS_FILE


class Trained:
    """A model whose backwards are reduced or not."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.reductions = UserReductions()
        collectives = SimpleNamespace(
            call_sites=SimpleNamespace(location=lambda number: ("train.py", number, "main") if number else None),
            position=SimpleNamespace(backward_call_site=5, flags=0),
        )
        parameters = [*self.module.parameters()]
        reader = GradientReader(self.reductions, parameters, frozenset({0, 1}))
        self.loop = ModelLoop(0, ["weight", "bias"], parameters, collectives, reader)  # type: ignore[arg-type]
        self.step = 0

    def backward(self, *, is_reduced: bool = True) -> None:
        self.loop.on_backward()
        self.module(torch.ones(1, 2)).sum().backward()
        if is_reduced:
            self.loop.on_gradients_reduced()

    def reduce_by_hand(self) -> None:
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            self.reductions.on_reduction([parameter.grad], 9, (0, 1))

    def update(self, *, to_none: bool = True) -> None:
        self.loop.on_update(self.optimizer, self.step)
        self.optimizer.zero_grad(set_to_none=to_none)
        self.step += 1


def test_backwards_are_counted_by_step() -> None:
    trained = Trained()
    for backwards in (2, 2, 3, 2):
        for number in range(backwards):
            trained.backward(is_reduced=number == backwards - 1)
        trained.update()
    facts = trained.loop.summarize()
    assert facts == LoopFacts(micro_batches=(MicroBatches(model=0, changes=((0, 2), (2, 3), (3, 2)), last_step=3),))


def test_gradients_that_are_reduced_by_hand_as_well_are_noted_with_the_line() -> None:
    trained = Trained()
    for step in range(3):
        trained.backward()
        if step:
            trained.reduce_by_hand()
        trained.update()
    (found,) = trained.loop.summarize().repeated
    assert found == RepeatedReductions(model=0, by="user", step=1, updates=2, site="train.py:9 (main)", backwards=1)


def test_a_reduction_by_hand_in_place_of_ddps_is_none_too_many() -> None:
    trained = Trained()
    trained.backward(is_reduced=False)
    trained.reduce_by_hand()
    trained.update()
    assert trained.loop.summarize().repeated == ()


def test_backwards_that_add_to_reduced_gradients_are_noted() -> None:
    trained = Trained()
    for _ in range(4):
        trained.backward()
        trained.backward()
        trained.update()
    (found,) = trained.loop.summarize().repeated
    assert (found.by, found.step, found.updates, found.backwards) == ("backwards", 0, 4, 2)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_set_to_zero_in_between_are_not(to_none: bool) -> None:
    trained = Trained()
    for _ in range(4):
        trained.backward()
        trained.optimizer.zero_grad(set_to_none=to_none)  # of a discriminator, after the generator's loss
        trained.backward()
        trained.update(to_none=to_none)
    assert trained.loop.summarize().repeated == ()


def test_parameters_that_no_optimizer_has_are_named() -> None:
    trained = Trained()
    trained.optimizer = torch.optim.SGD([trained.module.weight], lr=0.1)
    trained.backward()
    trained.update()
    assert trained.loop.summarize().unheld == (UnheldParameters(model=0, names=("bias",), count=1),)
    trained.optimizer.add_param_group({"params": [trained.module.bias]})
    trained.backward()
    trained.update()
    assert trained.loop.summarize().unheld == ()


def test_batches_are_hashed_if_a_training_uses_them() -> None:
    hashes, others = BatchHashes(), BatchHashes()
    for number in range(40):
        batch = {"ids": torch.full((8,), number), "more": ["text"]}
        hashes.on_fetched((torch.zeros(3), 1))  # of an evaluation
        for one in (hashes, others):
            one.on_fetched(batch)
            one.on_forward_start()
    assert hashes.latest() == others.latest()
    assert [number for number, _ in hashes.latest()] == [0, 1, 2, 3, 32]
    assert len({value for _, value in hashes.latest()}) == 5


def test_without_a_loader_what_the_model_is_given_is_hashed() -> None:
    hashes = BatchHashes()
    for number in range(5):
        hashes.on_inputs((torch.full((8, 2), float(number)).to(torch.bfloat16),))
    assert len(hashes.latest()) == 4


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    facts = LoopFacts(
        micro_batches=(MicroBatches(model=0, changes=((0, 2), (2, 3)), last_step=3),), batches=((0, "ab"), (1, "cd"))
    )
    LoopFactsWriter(tmp_path, lambda: facts).run()
    assert read_dataclasses(LoopFacts, tmp_path / LOOP_FACTS_FILE, []) == (facts,)
