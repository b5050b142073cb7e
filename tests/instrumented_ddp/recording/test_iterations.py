"""Which loop's iterations are steps where several optimizers are stepped: real loops, with what happens in them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from instrumented_ddp.recording.iterations import IterationTracker


class Steps:
    """Counts steps as the recorder does: at a forward after an update."""

    def __init__(self, optimizers: int = 2) -> None:
        self.tracker = IterationTracker()
        self.optimizers = [Optimizer(self.tracker) for _ in range(2)]
        self.tracker.expect(self.optimizers[:optimizers])
        self.step = 0
        self.has_updated = False
        self.missed = 0

    def train(self, optimizer: int) -> None:
        self.forward()
        self.update(optimizer)

    def forward(self) -> None:
        begun = self.tracker.count_begun() if self.has_updated else 0
        if begun:
            self.step += begun + self.missed
            self.has_updated, self.missed = False, 0

    def update(self, optimizer: int) -> None:
        self.missed += self.tracker.on_update(self.optimizers[optimizer])
        self.has_updated = True


def in_turn(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        steps.train(0)
        steps.train(1)


def critics(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        for _ in range(5):
            steps.train(0)
        steps.train(1)


def inner_loops(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        for _ in range(2):
            steps.train(0)
        for _ in range(3):
            steps.train(1)


def now_and_then(steps: Steps, iterations: int) -> None:
    iteration = 0
    while iteration < iterations:
        steps.train(0)
        if iteration % 5 == 4:
            steps.train(1)
        iteration += 1


def alternating(steps: Steps, iterations: int) -> None:
    for iteration in range(iterations):
        if iteration % 2 == 0:
            steps.train(0)
        else:
            steps.train(1)


def accumulating(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        for _ in range(4):
            steps.forward()
        steps.update(0)
        steps.update(1)


def epochs(steps: Steps, iterations: int) -> None:
    for _ in range(2):
        for _ in range(iterations // 2):
            steps.train(0)
            steps.forward()
            steps.update(1)


def one_batch(steps: Steps) -> None:
    steps.train(0)
    steps.train(1)


def critic(steps: Steps) -> None:
    for _ in range(3):
        steps.train(0)


def generator(steps: Steps) -> None:
    steps.train(1)


def in_functions(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        critic(steps)
        generator(steps)


def in_one_function(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        one_batch(steps)


def only_one_is_stepped(steps: Steps, iterations: int) -> None:
    for _ in range(iterations):
        steps.train(0)


Loop = Callable[[Steps, int], None]


@pytest.mark.parametrize(
    "loop",
    [
        in_turn,
        critics,
        inner_loops,
        now_and_then,
        alternating,
        accumulating,
        epochs,
        in_functions,
        in_one_function,
        only_one_is_stepped,
    ],
)
def test_a_step_is_an_iteration_of_the_loop_in_which_all_optimizers_are_stepped(loop: Loop) -> None:
    steps = Steps()
    loop(steps, 40)
    assert steps.step + steps.missed == 39, "the last one ends with the next forward"


def test_without_a_loop_every_update_ends_a_step() -> None:
    steps = Steps()

    def train() -> None:
        steps.train(0)
        steps.train(1)
        steps.train(0)
        steps.train(1)

    thread = threading.Thread(target=train)  # the test itself runs in loops of pytest
    thread.start()
    thread.join()
    assert steps.step == 3


def test_an_optimizer_whose_part_of_the_training_is_over_is_not_waited_for() -> None:
    steps = Steps()

    def train() -> None:
        for _ in range(20):
            steps.train(0)
        for _ in range(20):
            steps.train(1)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert steps.step + steps.missed == 39


def test_an_optimizer_that_has_stopped_within_a_common_loop_is_waited_for_some_rounds() -> None:
    steps = Steps()
    for part in range(2):
        for _ in range(100):
            steps.train(part)
    assert steps.step + steps.missed == 199


def test_an_optimizer_made_later_belongs_to_the_same_steps() -> None:
    steps = Steps(1)
    for iteration in range(20):
        steps.train(0)
        if iteration >= 10:
            steps.train(1)
    assert steps.step == 19


class Optimizer:
    """What a loop calls ``step`` of."""

    def __init__(self, tracker: IterationTracker) -> None:
        self.tracker = tracker

    def step(self) -> None:
        self.tracker.on_update(self)


@pytest.mark.parametrize("is_attribute", [False, True])
def test_iterations_before_an_optimizer_first_steps_are_counted_if_the_loop_steps_it(is_attribute: bool) -> None:
    tracker = IterationTracker()
    critic, generator = Optimizer(tracker), Optimizer(tracker)
    models = Optimizer(tracker)
    models.optimizer = generator  # type: ignore[attr-defined]
    tracker.expect([critic, generator])
    counts = []
    for iteration in range(4):
        if iteration:
            counts.append(tracker.count_begun())
        critic.step()
        if iteration % 5 == 4:
            if is_attribute:
                models.optimizer.step()  # type: ignore[attr-defined]
            else:
                generator.step()
    assert counts == [1, 1, 1]


def test_rounds_of_a_critic_before_the_first_step_of_its_generator_are_no_iterations() -> None:
    tracker = IterationTracker()
    critic, generator = Optimizer(tracker), Optimizer(tracker)
    tracker.expect([critic, generator])
    for _ in range(2):
        for round_of_critic in range(3):
            if round_of_critic:
                assert tracker.count_begun() == 0
            critic.step()
        generator.step()
