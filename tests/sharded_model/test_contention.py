"""What runs at the same time on a host slows each other down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from overlapscope.sharded_model.changes import assume_contention
from overlapscope.sharded_model.model import Settings
from overlapscope.sharded_model.program import Op
from overlapscope.sharded_model.schedule import NO_CONTENTION, Contention, simulate
from overlapscope.sharded_model.times import Line, PartTimes, ShardedTimes

ASYNC = Settings(units=(), reshards=(), is_async=True, forward_prefetch=(), backward_prefetch=())
LINE = Line(alpha_ns=0, beta_ns_per_byte=0, alpha_error_ns=0)
NOTHING = PartTimes(transfer_ns={}, overhead_ns={}, line=LINE, bytes={})


def step_ns(ops: Sequence[Op], gathers_ns: Sequence[float], compute_ns: float, contention: Contention) -> float:
    """The step of two ranks that are alike, in which gathers take as long as given."""
    zero_ns, segment_ns = np.zeros((1, 2)), np.full((1, 2, 1), compute_ns)
    transfer_ns = {part: np.full((1, 2), time_ns) for part, time_ns in enumerate(gathers_ns)}
    gathers = PartTimes(transfer_ns=transfer_ns, overhead_ns={}, line=LINE, bytes=dict.fromkeys(transfer_ns, 1))
    times = ShardedTimes(
        start_ns=zero_ns,
        before_ns=zero_ns,
        forward_ns=segment_ns,
        backward_ns=segment_ns,
        after_ns=zero_ns,
        gathers={"forward": gathers, "backward": gathers},
        reduces=NOTHING,
        replica_reduces=None,
        shard_groups=((0, 1),),
        replica_groups=(),
        blocks_host=True,
    )
    return float(simulate(times, ops, ASYNC, contention)[0])


def gather(part: int) -> Op:
    return Op("gather", (part,), "forward")


def wait(part: int) -> Op:
    return Op("wait", (part,), "forward")


COMPUTE = Op("compute", (0,), "forward")


@pytest.mark.parametrize(("compute_ns", "expected_ns"), [(10, 25), (40, 50)])
def test_compute_and_a_gather_take_longer_as_long_as_both_run(compute_ns: float, expected_ns: float) -> None:
    """A gather of 20 ns beside compute of 10 ns ends at 25; compute of 40 ns beside it ends at 50."""
    ops = [gather(0), COMPUTE, wait(0)]
    assert step_ns(ops, [20], compute_ns, Contention(compute_slowdown=1.5)) == expected_ns
    assert step_ns(ops, [20], compute_ns, NO_CONTENTION) == max(20, compute_ns)


@pytest.mark.parametrize(
    ("contention", "expected_ns"),
    [
        (NO_CONTENTION, 40),
        (Contention(lanes=2, lane_slowdown=2.0), 40),
        (Contention(lanes=2, lane_slowdown=1.5), 30),
        (Contention(lanes=2, lane_slowdown=1.0), 20),
    ],
)
def test_two_gathers_at_a_time_share_the_link(contention: Contention, expected_ns: float) -> None:
    """Of gathers of 20, 10 and 10 ns the last two follow each other beside the first."""
    ops = [gather(0), gather(1), gather(2), wait(0), wait(1), wait(2)]
    assert step_ns(ops, [20, 10, 10], 0, contention) == expected_ns


def test_nothing_is_slower_where_nothing_runs_at_the_same_time() -> None:
    ops = [gather(0), wait(0), COMPUTE, gather(1), wait(1), COMPUTE]
    assert step_ns(ops, [20, 10], 15, Contention(compute_slowdown=1.5, lanes=2, lane_slowdown=2.0)) == 60


def test_compute_that_lacks_cores_already_is_slowed_down_by_more() -> None:
    (few, none) = (assume_contention(coreless_share) for coreless_share in (0.2, 0.0))
    assert [one.compute_slowdown for one in few] == pytest.approx([1.45, 1.0, 1.9])
    assert [one.compute_slowdown for one in none] == pytest.approx([1.25, 1.0, 1.5])
