"""The account of the job: what all ranks together waited for at each moment, which sums to the step time as well.

One path leads backwards through the recording. It stays on a rank until that rank has waited for a collective; there
it follows the transfers, one before the other, to the arrival that the first of them had to wait for, and goes on with
the rank that arrived. To make anything off the path quicker would not have made the job quicker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.account.alike import AlikeSteps
from overlapscope.account.blocks import BLOCKS, Account
from overlapscope.account.by_rank import RowsByRank
from overlapscope.account.intervals import Int64Array
from overlapscope.account.waits import LONG_AGO, REASONS, Starts
from overlapscope.trace.reader import Trace

_TRANSFERS: Final = {-1: "exposed", -2: "buffers"}
"""The block of what is on no rank."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CriticalPath:
    """Where the path is, by time, without a gap: P pieces, on the common clock."""

    who: Int64Array
    """(P,) the rank, or a negative number while something is transferred that ranks wait for."""
    from_ns: Int64Array
    """(P,)"""
    until_ns: Int64Array
    """(P,)"""


@dataclass(frozen=True, eq=False, kw_only=True)
class JobAccount:
    """What the steps of a job consist of. A step lasts from the mean of its starts on all ranks to that of its ends."""

    steps: Int64Array
    """(F,) numbers of the steps that ranks have finished together."""
    start_ns: Int64Array
    """(F,) on the common clock."""
    end_ns: Int64Array
    """(F,)"""
    ns: Int64Array
    """(F, len(BLOCKS)); a row sums to ``end_ns - start_ns``. ``exposed`` is transfers: while ranks wait for another
    one, it is what that one does."""
    ranks: Int64Array
    """(R,) all ranks that have finished a step."""
    rank_ns: Int64Array
    """(F, R) how long the path is on each of them; the rest of a step is transfers."""
    path: CriticalPath


def job_account_of(
    trace: Trace, account: Account, alike: AlikeSteps, ranks: Int64Array | None = None
) -> JobAccount | None:
    """Follow the critical path; None if times of some ranks can't be compared, or no step is known on all of them.

    Args:
        ranks: all that have finished a step, if this is a part of a recording.
    """
    ranks = np.unique(account.rank) if ranks is None else ranks
    known = set(ranks.tolist())  # a rank that has finished no step has none that the path could be divided by
    is_comparable = {*trace.expected_ranks, *known} == set(account.matched.ranks.tolist()) == known
    if not len(alike.finished) or not is_comparable:
        return None
    start_ns, end_ns = (
        edge[alike.finished_rows].mean(axis=1).astype(np.int64) for edge in (account.start_ns, account.end_ns)
    )
    path = _path(trace, account, int(start_ns.min()), int(end_ns.max()))
    who, from_ns, until_ns = path.who, path.from_ns, path.until_ns
    # Pieces of the path within the steps: the edges of steps cut it.
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
    for place, rank in enumerate(ranks.tolist()):
        own = pieces_of[rank]
        np.add.at(ns, step[own], account.timelines[rank].within(from_ns[own], until_ns[own]))
        np.add.at(rank_ns[:, place], step[own], (until_ns - from_ns)[own])
    steps = alike.finished
    return JobAccount(steps=steps, start_ns=start_ns, end_ns=end_ns, ns=ns, ranks=ranks, rank_ns=rank_ns, path=path)


def _path(trace: Trace, account: Account, begin_ns: int, end_ns: int) -> CriticalPath:
    """The path between two moments; what is transferred has a number of ``_TRANSFERS``."""
    starts, waits, ranks = account.starts, _Entries(trace, account), len(np.unique(account.rank))
    transfer = np.where(trace.collectives["bucket"] >= 0, -1, -2)
    pieces: list[tuple[int, int, int]] = []
    last = np.flatnonzero(account.end_ns == account.end_ns.max())[0]
    rank, now_ns, moves_left = int(account.rank[last]), max(end_ns, int(account.end_ns[last])), ranks

    def go_back(where: int, to_ns: int) -> None:
        nonlocal now_ns, moves_left
        if to_ns < now_ns:
            pieces.append((where, to_ns, now_ns))
            now_ns, moves_left = to_ns, ranks

    while now_ns > begin_ns:
        from_ns, until_ns, collectives = waits[rank]
        place = int(np.searchsorted(from_ns, now_ns)) - 1
        if place < 0 or moves_left == 0:
            go_back(rank, begin_ns if place < 0 else int(from_ns[place]))
            continue
        go_back(rank, int(until_ns[place]))
        moves_left -= 1
        for row, sent_ns in _queue(starts, int(collectives[place]), now_ns):
            go_back(int(transfer[row]), sent_ns)
        rank = int(starts.last_rank[row])
    who, from_ns, until_ns = np.array(pieces[::-1], dtype=np.int64).reshape(-1, 3).T
    return CriticalPath(who=who, from_ns=from_ns, until_ns=until_ns)


def _queue(starts: Starts, row: int, now_ns: int) -> Iterator[tuple[int, int]]:
    """A transfer and those that it queues behind, the newest first, each with when it could begin.

    Args:
        row: in ``trace.collectives``.
        now_ns: it is under way.
    """
    while True:
        arrived_ns, free_ns = int(starts.last_ns[row]), int(starts.free_ns[row])
        yield row, max(arrived_ns, free_ns)
        now_ns = min(now_ns, max(arrived_ns, free_ns))
        if free_ns <= arrived_ns or free_ns > now_ns:
            return
        row = int(starts.freed_by[row])


def comes_from_anywhere(trace: Trace, account: Account, now_ns: int, then_ns: int) -> bool:
    """Whether the path is in the same place at an earlier moment, from whichever rank it comes at a later one.

    Then nothing that happens after the later one has a say in where it was before.
    """
    starts, waits = account.starts, _Entries(trace, account)
    ahead = {(rank, now_ns) for rank in np.unique(account.rank).tolist()}
    seen, places = set(ahead), set[tuple[int, ...]]()
    while ahead:
        rank, now_ns = ahead.pop()
        from_ns, until_ns, collectives = waits[rank]
        place = int(np.searchsorted(from_ns, now_ns)) - 1
        if place < 0 or until_ns[place] <= then_ns:
            places.add((rank,))
            continue
        now_ns = min(now_ns, int(until_ns[place]))
        for row, sent_ns in _queue(starts, int(collectives[place]), now_ns):
            now_ns = min(now_ns, sent_ns)
            if now_ns <= then_ns:
                places.add((int(starts.last_rank[row]), int(starts.last_ns[row]), sent_ns))  # on the way to it
                break
        else:
            came_from = int(starts.last_rank[row]), now_ns
            if came_from not in seen:
                seen.add(came_from)
                ahead.add(came_from)
    return len(places) == 1


class _Entries:
    """By rank, where the path leaves it: from when and until when it waited for which collective, by time."""

    def __init__(self, trace: Trace, account: Account) -> None:
        waits, table = account.waits, trace.collectives
        awaited = np.flatnonzero(waits.reason != REASONS.index("launch"))  # until then it is the rank's own doing
        sent = np.flatnonzero((table["op"] == "broadcast") & table["end_ns"].notna())
        end_ns = table["end_ns"].to_numpy(np.int64, na_value=0)
        self._columns = (
            np.concatenate([waits.start_ns[awaited], account.starts.own_ns[sent]]),
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
