"""Where a loop has no data loader, one of its variables says which batch it is at."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from instrumented_ddp.collectives.call_sites import CallSiteTable
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.recording.batch_tracker import DataPositionTracker
from overlapscope.trace.collective_log import UNKNOWN


class _OurFrames(CallSiteTable):
    """Takes the caller of a forward for the user's code."""

    def __init__(self) -> None:
        """Write no file."""

    def find_caller_frame(self):
        return sys._getframe(3)


@pytest.fixture
def position() -> TrainingPosition:
    return TrainingPosition()


@pytest.fixture
def tracker(position: TrainingPosition) -> Iterator[DataPositionTracker]:
    tracker = DataPositionTracker(position, _OurFrames())
    yield tracker
    tracker.close()


def forward(tracker: DataPositionTracker) -> None:
    tracker.on_forward_start()


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_the_counter_is_found_however_many_forwards_an_iteration_has(
    tracker: DataPositionTracker, position: TrainingPosition, forwards: int
) -> None:
    iteration = 40
    while iteration < 60:
        iteration += 1
        if iteration == 55:
            continue
        for _ in "abc"[:forwards]:
            forward(tracker)
    assert position.batch == 60


def test_what_grows_now_and_then_is_no_counter(tracker: DataPositionTracker, position: TrainingPosition) -> None:
    correct = 0
    for hit in (1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1):
        correct += hit
        forward(tracker)
    assert (correct, position.batch) == (7, UNKNOWN)
