"""Critical path of the job: what all ranks together waited for at each moment, which also sums to the step time.

The path is followed backward in time. It stays on a rank back to the end of a wait for a collective; there it follows
the transfers, each to the one that it queued behind, to the arrival that the first of them had to wait for, and
continues on the rank that arrived last. Making anything off the path faster would not have made the job faster.

Example: both ranks begin a step at 0 ns. Rank 0 waits from 50 to 100 ns for an all-reduce that rank 1 enters at 80 ns,
and finishes its optimizer at 110 ns. The path is rank 1 from 0 to 80, the transfer from 80 to 100, and rank 0 from 100
to 110.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.breakdown.breakdown import BLOCKS, Breakdown
from overlapscope.breakdown.spans import Int64Array, RowsByRank
from overlapscope.breakdown.steady_steps import SteadySteps
from overlapscope.breakdown.waits import LONG_AGO, REASONS, StartConditions
from overlapscope.trace.recording import Trace

_TRANSFERS: Final = {-1: "exposed", -2: "buffers"}
"""Block of each pseudo-rank that stands for a transfer."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CriticalPath:
    """Location of the critical path over time, without gaps: P segments, on the common clock."""

    who: Int64Array
    """(P,) Rank, or a negative key of ``_TRANSFERS`` during a transfer that ranks wait for."""
    from_ns: Int64Array
    """(P,) Start of each segment."""
    until_ns: Int64Array
    """(P,) End of each segment."""


@dataclass(frozen=True, eq=False, kw_only=True)
class JobBreakdown:
    """Step-time breakdown of the job along its critical path.

    A step lasts from the mean of its starts on all ranks to the mean of its ends.
    """

    steps: Int64Array
    """(F,) Numbers of the steps that all counted ranks have finished."""
    start_ns: Int64Array
    """(F,) Start of each step, on the common clock."""
    end_ns: Int64Array
    """(F,) End of each step, on the common clock."""
    ns: Int64Array
    """(F, len(BLOCKS)) Time in each block; a row sums to ``end_ns - start_ns``. ``exposed`` is transfers only: a wait
    for another rank counts as what that rank does."""
    ranks: Int64Array
    """(R,) All ranks that have finished a step."""
    rank_ns: Int64Array
    """(F, R) Time for which the path is on each rank; the rest of a step is transfers."""
    path: CriticalPath


def compute_job_breakdown(
    trace: Trace, breakdown: Breakdown, steady: SteadySteps, ranks: Int64Array | None = None
) -> JobBreakdown | None:
    """Follow the critical path and break it down by step.

    Args:
        ranks: All ranks that have finished a step. Needed if the breakdown is only of a part of a recording.

    Returns:
        None if times of some ranks can't be compared, or if no step was finished by all of them.
    """
    ranks = np.unique(breakdown.rank) if ranks is None else ranks
    known = set(ranks.tolist())  # without finished steps of a rank, the path on it could not be divided
    is_comparable = {*trace.expected_ranks, *known} == set(breakdown.matched.ranks.tolist()) == known
    if not len(steady.finished) or not is_comparable:
        return None
    start_ns, end_ns = (
        edge[steady.finished_rows].mean(axis=1).astype(np.int64) for edge in (breakdown.start_ns, breakdown.end_ns)
    )
    path = _follow_path(trace, breakdown, int(start_ns.min()), int(end_ns.max()))
    who, from_ns, until_ns = path.who, path.from_ns, path.until_ns
    # Segments of the path within steps: step boundaries cut it.
    edges_ns = np.unique(np.concatenate([from_ns, until_ns, start_ns, end_ns]))
    piece = np.searchsorted(from_ns, edges_ns[:-1], side="right") - 1
    step = np.searchsorted(start_ns, edges_ns[:-1], side="right") - 1
    inside = (piece >= 0) & (step >= 0)
    inside &= edges_ns[1:] <= np.where(inside, end_ns[step], LONG_AGO)
    piece, step, from_ns, until_ns = piece[inside], step[inside], edges_ns[:-1][inside], edges_ns[1:][inside]
    ns = np.zeros((len(start_ns), len(BLOCKS)), dtype=np.int64)
    rank_ns = np.zeros((len(start_ns), len(ranks)), dtype=np.int64)
    for number, name in _TRANSFERS.items():
        sent = who[piece] == number
        np.add.at(ns[:, BLOCKS.index(name)], step[sent], (until_ns - from_ns)[sent])
    pieces_of = RowsByRank(who[piece])
    for index, rank in enumerate(ranks.tolist()):
        own = pieces_of[rank]
        np.add.at(ns, step[own], breakdown.timelines[rank].within(from_ns[own], until_ns[own]))
        np.add.at(rank_ns[:, index], step[own], (until_ns - from_ns)[own])
    steps = steady.finished
    return JobBreakdown(steps=steps, start_ns=start_ns, end_ns=end_ns, ns=ns, ranks=ranks, rank_ns=rank_ns, path=path)


def _follow_path(trace: Trace, breakdown: Breakdown, begin_ns: int, end_ns: int) -> CriticalPath:
    """Return the path between two moments; transfers have a key of ``_TRANSFERS`` instead of a rank."""
    starts, waits, ranks = breakdown.starts, _PathExits(trace, breakdown), len(np.unique(breakdown.rank))
    transfer = np.where(trace.collectives["bucket"] >= 0, -1, -2)
    pieces: list[tuple[int, int, int]] = []
    last = np.flatnonzero(breakdown.end_ns == breakdown.end_ns.max())[0]
    rank, now_ns, moves_left = int(breakdown.rank[last]), max(end_ns, int(breakdown.end_ns[last])), ranks

    def extend_back(where: int, to_ns: int) -> None:
        nonlocal now_ns, moves_left
        if to_ns < now_ns:
            pieces.append((where, to_ns, now_ns))
            now_ns, moves_left = to_ns, ranks

    while now_ns > begin_ns:
        from_ns, until_ns, collectives = waits[rank]
        index = int(np.searchsorted(from_ns, now_ns)) - 1
        if index < 0 or moves_left == 0:
            extend_back(rank, begin_ns if index < 0 else int(from_ns[index]))
            continue
        extend_back(rank, int(until_ns[index]))
        moves_left -= 1
        for row, sent_ns in _transfer_queue(starts, int(collectives[index]), now_ns):
            extend_back(int(transfer[row]), sent_ns)
        rank = int(starts.last_rank[row])
    who, from_ns, until_ns = np.array(pieces[::-1], dtype=np.int64).reshape(-1, 3).T
    return CriticalPath(who=who, from_ns=from_ns, until_ns=until_ns)


def _transfer_queue(starts: StartConditions, row: int, now_ns: int) -> Iterator[tuple[int, int]]:
    """Yield a transfer and those that it queued behind, the latest first, each with the time at which it could begin.

    Example: a transfer whose last rank arrived at 10 ns, but that got a lane at 30 ns when a transfer that began at 5
    ns ended, yields itself with 30 and the other one with 5.

    Args:
        row: Row in ``trace.collectives``.
        now_ns: A moment at which it is in progress.
    """
    while True:
        arrived_ns, free_ns = int(starts.last_ns[row]), int(starts.free_ns[row])
        yield row, max(arrived_ns, free_ns)
        now_ns = min(now_ns, max(arrived_ns, free_ns))
        if free_ns <= arrived_ns or free_ns > now_ns:
            return
        row = int(starts.freed_by_row[row])


def paths_converge_before(trace: Trace, breakdown: Breakdown, now_ns: int, then_ns: int) -> bool:
    """Return True if the path is at the same position at an earlier moment, whichever rank it is on at a later one.

    Then nothing that happens after the later moment can affect where the path was before the earlier one.

    Args:
        now_ns: The later moment.
        then_ns: The earlier moment.
    """
    starts, waits = breakdown.starts, _PathExits(trace, breakdown)
    ahead = {(rank, now_ns) for rank in np.unique(breakdown.rank).tolist()}
    seen, positions = set(ahead), set[tuple[int, ...]]()
    while ahead:
        rank, now_ns = ahead.pop()
        from_ns, until_ns, collectives = waits[rank]
        index = int(np.searchsorted(from_ns, now_ns)) - 1
        if index < 0 or until_ns[index] <= then_ns:
            positions.add((rank,))
            continue
        now_ns = min(now_ns, int(until_ns[index]))
        for row, sent_ns in _transfer_queue(starts, int(collectives[index]), now_ns):
            now_ns = min(now_ns, sent_ns)
            if now_ns <= then_ns:
                positions.add(
                    (int(starts.last_rank[row]), int(starts.last_ns[row]), sent_ns)
                )  # in transfer to this rank
                break
        else:
            came_from = int(starts.last_rank[row]), now_ns
            if came_from not in seen:
                seen.add(came_from)
                ahead.add(came_from)
    return len(positions) == 1


class _PathExits:
    """By rank, where the path can leave it: start, end and collective of each wait, by time."""

    def __init__(self, trace: Trace, breakdown: Breakdown) -> None:
        waits, table = breakdown.waits, trace.collectives
        awaited = np.flatnonzero(waits.reason != REASONS.index("launch_delay"))  # until then this rank is late itself
        sent = np.flatnonzero((table["op"] == "broadcast") & table["end_ns"].notna())
        end_ns = table["end_ns"].to_numpy(np.int64, na_value=0)
        self._columns = (
            np.concatenate([waits.start_ns[awaited], breakdown.starts.local_arrival_ns[sent]]),
            np.concatenate([waits.end_ns[awaited], end_ns[sent]]),
            np.concatenate([waits.collective[awaited], sent]),
        )
        self._rows_of = RowsByRank(np.concatenate([waits.rank[awaited], table["rank"].to_numpy(np.int64)[sent]]))
        self._found: dict[int, tuple[Int64Array, Int64Array, Int64Array]] = {}

    def __getitem__(self, rank: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        if rank not in self._found:
            from_ns, until_ns, row = (column[self._rows_of[rank]] for column in self._columns)
            order = np.argsort(from_ns, kind="stable")
            self._found[rank] = from_ns[order], until_ns[order], row[order]
        return self._found[rank]
