"""What is said of when a collective still ran is true, also if it ends while we look."""

from __future__ import annotations

from typing import Any

from instrumented_ddp.recording.records import BucketCollective
from instrumented_ddp.reduction import communicator


def test_a_collective_that_ends_right_after_the_look_was_seen_running_before_it(monkeypatch):
    # A moment between two instructions can't be met on purpose with real work, so clock and work are played here.
    clock_ns = [100]
    monkeypatch.setattr(communicator, "host_now_ns", lambda: clock_ns[0])

    class EndsRightAfterTheLook:
        def is_completed(self) -> bool:
            clock_ns[0] += 1_000_000
            return False

    collective: Any = BucketCollective(records=None, step=0)
    collective.work = EndsRightAfterTheLook()
    communicator._note_if_running(collective)
    assert collective.running_ns == 100
