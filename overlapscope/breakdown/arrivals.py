"""When each rank arrives at each collective, which rank is last, and how long the transfer takes after that.

A collective can't begin before its last rank arrives, so its time on one rank is a *wait* for the last rank followed by
a *transfer*. A long wait is caused by a straggler, a long transfer by a link.

Example: rank 0 arrives at 10 ns, rank 1 at 30 ns, and both see the end at 50 ns. Rank 0 waits for 20 ns, rank 1 for 0
ns, and the transfer takes 20 ns on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.spans import Int64Array
from overlapscope.trace.collective_arrival import compute_arrival_ns, index_in_runs
from overlapscope.trace.communication import ENDS_TOGETHER
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import OPS
from overlapscope.trace.sharding import find_sharding

_SHARES: Final = np.array([{"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}.get(op, 0) for op in OPS])
"""By operation, number of times that ``(N - 1) / N`` of the buffer leaves each rank; 0 where another share leaves
it."""
_ENDS_TOGETHER: Final = np.isin(OPS, ENDS_TOGETHER)
"""By operation, whether it ends on no rank before all have arrived."""
_TIMING_ERROR_NS: Final = 200_000
"""Maximum error of arrivals and ends beside that of the clocks."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchedCollectives:
    """Collectives that every rank took part in and completed: N of them, by step and launch, on R ranks.

    Times are nanoseconds of the common clock.
    """

    ranks: Int64Array
    """(R,) Ranks, ascending."""
    rows: Int64Array
    """(N, R) Row indices in ``trace.collectives``."""
    step: Int64Array
    """(N,) Step of each collective."""
    bucket: Int64Array
    """(N,) Bucket of each collective; -1 for one that belongs to no bucket."""
    op: npt.NDArray[np.int8]
    """(N,) Index in ``format.OPS``."""
    bytes: Int64Array
    """(N,) Size of the buffer in bytes."""
    arrival_ns: Int64Array
    """(N, R) When a rank arrives: it has launched the collective, and its device has the gradients ready."""
    end_ns: Int64Array
    """(N, R) When a rank sees the collective complete."""
    clock_error_ns: float
    """Maximum error of a time difference between two ranks."""
    groups: Mapping[int, Int64Array] = field(default_factory=dict)
    """By operation that is done in several groups of ranks at a time: the number of each rank's group (R,). Then the
    collectives of all groups are one collective here, in which each rank waits for its own group only."""

    def of(self, which: npt.NDArray[np.bool_]) -> MatchedCollectives:
        """Return the collectives that a mask (N,) selects."""
        return replace(
            self,
            rows=self.rows[which],
            step=self.step[which],
            bucket=self.bucket[which],
            op=self.op[which],
            bytes=self.bytes[which],
            arrival_ns=self.arrival_ns[which],
            end_ns=self.end_ns[which],
        )

    def find_last(self) -> tuple[Int64Array, Int64Array]:
        """Return when the last rank of each rank's group arrives, and its index in ``ranks`` (N, R).

        Example: of two pairs of ranks that arrive at 10, 30, 50 and 20 ns, the last ones arrive at 30, 30, 50 and 50
        ns, and are the ranks 1, 1, 2 and 2.
        """
        last_ns, last = np.empty_like(self.arrival_ns), np.zeros_like(self.arrival_ns)
        everybody = np.zeros(len(self.ranks), dtype=np.int64)
        for op in np.unique(self.op).tolist():
            of_op = self.op == op
            group_of = self.groups.get(op, everybody)
            for group in np.unique(group_of).tolist():
                members = np.flatnonzero(group_of == group)
                arrival_ns = self.arrival_ns[np.ix_(of_op, members)]
                last_ns[np.ix_(of_op, members)] = arrival_ns.max(axis=1)[:, None]
                last[np.ix_(of_op, members)] = members[arrival_ns.argmax(axis=1)][:, None]
        return last_ns, last

    def count_members(self) -> Int64Array:
        """Return how many ranks take part in each collective, on each rank (N, R)."""
        counts = np.full(self.arrival_ns.shape, len(self.ranks), dtype=np.int64)
        for op, group_of in self.groups.items():
            counts[self.op == op] = np.bincount(group_of)[group_of]
        return counts


def match_collectives(trace: Trace, *, has_common_clock: bool = True) -> MatchedCollectives:
    """Match the collectives of all ranks: those of one model, step, bucket and operation, in order of launch.

    Left out are ranks whose clock could not be aligned, ranks that train in another process group than the lowest rank,
    collectives that a rank did not launch or was never seen to complete, and those that can't be the same: ranks that
    have made different numbers of steps, as with uneven inputs, are at other collectives in the step with that number.

    Args:
        has_common_clock: False if times of two ranks can't be compared.
    """
    together = trace.expected_ranks or trace.aligned_ranks
    ranks = np.array(sorted(set(trace.aligned_ranks) & set(together)), dtype=np.int64)
    table = trace.collectives
    wanted = table["rank"].isin(ranks) & table["end_ns"].notna()
    wanted_rows = np.flatnonzero(wanted)
    if not wanted.all():
        table = table[wanted]
    rows = _rows_of_complete(table, ranks)
    launch_ns = table["launch_ns"].to_numpy(dtype=np.int64)
    step = table["step"].to_numpy(dtype=np.int64)
    lowest_rows = rows[:, :1].ravel()  # without ranks there is no column
    rows = rows[np.lexsort((launch_ns[lowest_rows], step[lowest_rows]))]
    arrival_ns = compute_arrival_ns(table)
    lowest_rows = rows[:, :1].ravel()
    matched = MatchedCollectives(
        ranks=ranks,
        rows=wanted_rows[rows],
        step=step[lowest_rows],
        bucket=table["bucket"].to_numpy(dtype=np.int64)[lowest_rows],
        op=table["op"].cat.codes.to_numpy().astype(np.int8)[lowest_rows],
        bytes=table["bytes"].to_numpy(dtype=np.int64)[lowest_rows],
        arrival_ns=arrival_ns[rows],
        end_ns=table["end_ns"].to_numpy(dtype=np.int64)[rows],
        clock_error_ns=trace.clock_error_ns,
        groups=_find_groups(trace, ranks),
    )
    return matched.of(~_find_impossible(matched)) if has_common_clock else matched


def _find_impossible(matched: MatchedCollectives) -> npt.NDArray[np.bool_]:
    """Return which collectives (N,) ended on a rank before another one arrived, though all need what all have."""
    last_ns, _ = matched.find_last()
    early_ns = (last_ns - matched.end_ns).max(axis=1, initial=0)
    return (early_ns > matched.clock_error_ns + _TIMING_ERROR_NS) & _ENDS_TOGETHER[matched.op]


def _find_groups(trace: Trace, ranks: Int64Array) -> dict[int, Int64Array]:
    """Return the groups of ``MatchedCollectives``: none unless models are sharded over a part of the ranks."""
    sharding = find_sharding(trace.run)
    found: dict[int, Int64Array] = {}
    for op in ("all_gather", "reduce_scatter", "all_reduce") if sharding is not None else ():
        groups = sharding.get_groups(op) if sharding is not None else ()
        number_of = {rank: number for number, group in enumerate(groups) for rank in group}
        if len(groups) > 1 and number_of.keys() >= set(ranks.tolist()):
            found[OPS.index(op)] = np.array([number_of[rank] for rank in ranks.tolist()], dtype=np.int64)
    return found


def compute_arrivals(matched: MatchedCollectives) -> pd.DataFrame:
    """Return a table with one row per collective and rank.

    Returns:
        step, bucket, op, bytes, rank, arrival_ns, end_ns, last_arrival_ns, last_rank, wait_ns (last arrival minus the
        arrival of this rank: time that the last rank costs this one), transfer_ns (end on this rank minus last arrival;
        it includes the time spent queued behind earlier collectives on the same link), algbw_bytes_per_s and
        busbw_bytes_per_s (as in nccl-tests: bytes over transfer, for all-reduce times 2(N-1)/N, and for reduce-scatter
        and all-gather, its two halves, times (N-1)/N).
    """
    count, ranks = matched.arrival_ns.shape
    last_ns, last = matched.find_last()
    last_arrival_ns = last_ns.ravel()
    members = matched.count_members().ravel()
    arrival_ns, end_ns = matched.arrival_ns.ravel(), matched.end_ns.ravel()
    transfer_ns = end_ns - last_arrival_ns
    bytes_ = np.repeat(matched.bytes, ranks)
    op = np.repeat(matched.op, ranks)
    algbw = np.divide(bytes_ * 1e9, transfer_ns, out=np.full(len(bytes_), np.nan), where=transfer_ns > 0)
    return pd.DataFrame(
        {
            "step": np.repeat(matched.step, ranks),
            "bucket": np.repeat(matched.bucket, ranks),
            "op": pd.Categorical.from_codes(op, categories=pd.Index(OPS)),
            "bytes": bytes_,
            "rank": np.tile(matched.ranks, count),
            "arrival_ns": arrival_ns,
            "end_ns": end_ns,
            "last_arrival_ns": last_arrival_ns,
            "last_rank": matched.ranks[last.ravel()],
            "wait_ns": last_arrival_ns - arrival_ns,
            "transfer_ns": transfer_ns,
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * np.where(_SHARES[op] > 0, _SHARES[op] * (members - 1) / members, 1.0),
        }
    )


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Arrival of one rank at one collective."""

    last_rank: int
    wait_ns: int
    """Time waited for the last rank; 0 if it is this one."""
    transfer_ns: int
    """Time from the last arrival to the end on this rank."""
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    """Bus bandwidth; NaN, like ``algbw_bytes_per_s``, if the transfer took no time."""
    clock_error_ns: float


def find_arrival(trace: Trace, row: pd.Series[Any]) -> Arrival | None:
    """Return how a rank arrived at a collective; None unless all ranks are known to have taken part.

    Args:
        row: A row of ``trace.collectives``.
    """
    table = trace.collectives
    same = np.logical_and.reduce([table[name].to_numpy() == row[name] for name in ("step", "bucket", "model")])
    matched = match_collectives(replace(trace, collectives=table[same & (table["op"] == row["op"])]))
    found = compute_arrivals(matched)
    own = found[(found["rank"] == row["rank"]) & (found["end_ns"] == row["end_ns"])]
    if own.empty:
        return None
    first = own.iloc[0]
    return Arrival(
        last_rank=int(first["last_rank"]),
        wait_ns=int(first["wait_ns"]),
        transfer_ns=int(first["transfer_ns"]),
        algbw_bytes_per_s=float(first["algbw_bytes_per_s"]),
        busbw_bytes_per_s=float(first["busbw_bytes_per_s"]),
        clock_error_ns=matched.clock_error_ns,
    )


def _rows_of_complete(table: pd.DataFrame, ranks: Int64Array) -> Int64Array:
    """Return the positions (N, R) in ``table`` of the collectives that all ranks have, by rank from left to right."""
    step, rank = table["step"].to_numpy(dtype=np.int64), table["rank"].to_numpy(dtype=np.int64)
    bucket, model = table["bucket"].to_numpy(dtype=np.int64) + 1, table["model"].to_numpy(dtype=np.int64)
    what = (model << 36) | (bucket << 3) | table["op"].cat.codes.to_numpy()
    each = len(table) // max(1, len(ranks))
    if np.array_equal(rank, np.repeat(ranks, each)) and all(_is_periodic(column, each) for column in (step, what)):
        # All ranks launched the same collectives in the same order, as they should: then the order of one rank is that
        # of all.
        return np.lexsort((what[:each], step[:each]))[:, None] + each * np.arange(len(ranks))
    order = np.lexsort((rank, what, step))
    occurrence = np.empty(len(order), dtype=np.int64)
    occurrence[order] = index_in_runs(step[order], what[order], rank[order])
    if occurrence.any():
        order = np.lexsort((rank, occurrence, what, step))
    position = index_in_runs(step[order], what[order], occurrence[order])
    # A run of R rows from the first row of a collective holds every rank once, as ranks differ within it.
    first = np.flatnonzero(position == 0)
    lengths = np.diff(np.append(first, len(order)))
    return order[first[lengths == len(ranks)][:, None] + np.arange(len(ranks))]


def _is_periodic(values: Int64Array, period: int) -> bool:
    """Return True if values repeat with a period."""
    return np.array_equal(values[period:], values[: len(values) - period])
