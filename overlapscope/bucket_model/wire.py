"""Scheduling of all-reduces launched one after the other on a shared link, with one or two lanes.

NCCL runs the all-reduces of a communicator one at a time. Gloo runs two at a time, and they share the bandwidth like
TCP streams: two large ones that begin together also end together, and a small one overtakes a large one. Each waits for
its latency separately, so the second lane hides it. Their mutual slowdown is between 1 and 2: 2 where one alone
saturates the link, less where it can't, as with a long round trip that limits the bytes in flight.
"""

from __future__ import annotations

import numpy as np

from overlapscope.bucket_model.partition import Float64Array, Int64Array


def schedule_one_lane(ready: Float64Array, transfer: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Compute when all-reduces begin and end that run one at a time.

    Example: ready at 0, 1, 10 and transfers of 4, 3, 2 give begins 0, 4, 10 and ends 4, 7, 12.

    Args:
        ready: (B, ...) time at which the last rank launches each; never decreasing along the first axis.
        transfer: (B, ...) duration of each alone; broadcasts to the shape of ``ready``.
    """
    sent = np.cumsum(transfer, axis=0)
    end = np.maximum.accumulate(ready - (sent - transfer), axis=0) + sent
    return end - transfer, end


def schedule_two_lanes(
    ready: Float64Array, transfer: Float64Array, latency: Float64Array, slowdown: float = 2.0
) -> tuple[Float64Array, Float64Array]:
    """Compute when all-reduces begin and end of which two run at a time.

    At any moment one is running that began before the latest one: the *older*. The first of the two to end frees its
    lane for the next.

    Example: all ready at 0, transfers of 4, 2, 1 without latency and a slowdown of 2. The first two share the link
    until 4, when the second ends and the third begins; the third and the rest of the first share it until 6, and the
    first ends at 7. Begins are 0, 0, 4 and ends 7, 4, 6.

    Args:
        ready: (B, ...) time at which the last rank launches each; never decreasing along the first axis.
        transfer: (B, ...) duration of each alone; broadcasts to the shape of ``ready``.
        latency: (B, ...) part of ``transfer``, at its beginning, during which the link is free for others.
        slowdown: Factor for each of two that are both past their latency.
    """
    shape = ready.shape[1:]
    begin, end = np.empty(ready.shape), np.empty(ready.shape)
    older: Int64Array = np.zeros(shape, dtype=np.int64)
    older_sends = np.full(shape, -np.inf)  # when its latency is over
    first_end, last_end = np.full(shape, -np.inf), np.full(shape, -np.inf)  # of the two that are running
    for number in range(len(ready)):
        begin[number] = now = np.maximum(ready[number], first_end)
        is_under_way = last_end > now
        older_sends = np.where(is_under_way, np.maximum(older_sends, now), now)
        older_left = np.where(is_under_way, last_end - older_sends, 0.0)
        sends = now + latency[number]
        older_end, newer_end = _shared_ends(
            older_sends, older_left, sends, transfer[number] - latency[number], slowdown
        )
        if number:
            np.put_along_axis(end, older[None], np.where(is_under_way, older_end, last_end)[None], axis=0)
        end[number] = newer_end
        first_end, last_end = np.minimum(older_end, newer_end), np.maximum(older_end, newer_end)
        is_overtaken = older_end > newer_end
        older = np.where(is_overtaken, older, number)
        older_sends = np.where(is_overtaken, older_sends, sends)
    return begin, end


def _shared_ends(
    one_sends: Float64Array,
    one_left: Float64Array,
    other_sends: Float64Array,
    other_left: Float64Array,
    slowdown: float,
) -> tuple[Float64Array, Float64Array]:
    """Compute when two all-reduces end that share the link once both are sending, if no other begins."""
    is_first = one_sends <= other_sends
    early, late = np.minimum(one_sends, other_sends), np.maximum(one_sends, other_sends)
    early_left, late_left = np.where(is_first, one_left, other_left), np.where(is_first, other_left, one_left)
    shared = np.maximum(early_left - (late - early), 0.0)  # what the early one has left when the late one sends
    lost = (slowdown - 1) * np.minimum(shared, late_left)
    early_end = np.where(shared > 0, late + shared + lost, early + early_left)
    late_end = late + late_left + lost
    return np.where(is_first, early_end, late_end), np.where(is_first, late_end, early_end)
