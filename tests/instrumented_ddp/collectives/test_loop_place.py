"""Whether a loop has begun its next iteration, by the lines at which its frames are."""

from __future__ import annotations

import sys

import pytest

from instrumented_ddp.collectives.call_sites import LoopTracker, iter_frames, list_traceback_frames
from instrumented_ddp.collectives.position import TrainingPosition


class Loop:
    """A training in the style of people's own trainers: what is asked for is called from several depths."""

    def __init__(self) -> None:
        self.place = LoopTracker(TrainingPosition(has_updated=True))
        self.said: list[tuple[str, bool | None]] = []

    def asks(self, where: str) -> None:
        self.said.append((where, self.place.has_begun_next_iteration(iter_frames(sys._getframe()))))

    def forward(self) -> None:
        self.place.on_forward_start()

    def training_step(self) -> None:
        self.forward()
        self.asks("in the step")

    def batches(self, count: int):
        for number in range(count):
            self.asks("in the loader")
            yield number

    def fit(self) -> None:
        for _ in range(2):
            self.asks("epoch begins")
            for _ in self.batches(2):
                self.asks("top of the loop")
                self.training_step()
                self.asks("end of the loop")
            self.asks("epoch ends")


def test_before_the_line_of_the_forward_a_loop_is_in_its_next_iteration_and_after_it_in_the_same() -> None:
    loop = Loop()
    loop.fit()
    assert set(loop.said[:3]) == {("epoch begins", None), ("in the loader", None), ("top of the loop", None)}
    after = set(loop.said[3:])
    assert after == {
        ("in the step", False),
        ("end of the loop", False),
        ("in the loader", True),
        ("top of the loop", True),
        ("epoch ends", False),
        ("epoch begins", True),
    }


def test_frames_that_were_not_there_in_the_forward_say_nothing() -> None:
    place = LoopTracker(TrainingPosition(has_updated=True))

    def one_step() -> None:
        place.on_forward_start()

    def elsewhere() -> None:
        assert place.has_begun_next_iteration([(sys._getframe(), 1)]) is None

    one_step()
    elsewhere()


def test_of_an_exception_the_lines_count_at_which_it_left_its_frames() -> None:
    place = LoopTracker(TrainingPosition(has_updated=True))

    def fails() -> None:
        raise ValueError("of the user")

    def loop(*, at_the_end: bool) -> None:
        for iteration in range(2):
            if iteration and not at_the_end:
                fails()
            place.on_forward_start()
            if at_the_end:
                fails()

    for at_the_end in (True, False):
        with pytest.raises(ValueError, match="of the user") as raised:
            loop(at_the_end=at_the_end)
        assert place.has_begun_next_iteration(list_traceback_frames(raised.value.__traceback__)) is not at_the_end


def test_a_forward_that_has_begun_since_the_update_is_of_the_next_iteration_wherever_its_frames_are() -> None:
    """Such as one in which DDP complains of the backward before it."""
    position = TrainingPosition()
    place = LoopTracker(position)
    here = (sys._getframe(), 10**6)
    assert place.has_begun_next_iteration([here]) is None
    place.on_forward_start()
    assert place.has_begun_next_iteration([here]) is True
    position.has_updated = True
    assert place.has_begun_next_iteration([here]) is False


def test_a_frame_of_torch_says_nothing_because_a_later_one_may_have_its_identity() -> None:
    place = LoopTracker(TrainingPosition(has_updated=True))
    namespace = {"place": place, "sys": sys}
    exec(
        compile(
            "def call():\n    place.on_forward_start()\n    return sys._getframe()", "/x/torch/nn/module.py", "exec"
        ),
        namespace,
    )
    frame = namespace["call"]()
    assert place.has_begun_next_iteration([(frame, 3)]) is None
