"""Blocks of a step: the breakdown of every step of every rank, which sums to the step time to the nanosecond.

Where several activities overlap, a moment belongs to the one that interrupts the others: a garbage collection stops the
optimizer, copies are a part of the backward, the broadcast of buffers is a part of what precedes a forward. While a
rank waits for gradients, the time until the last bucket has ended is *exposed communication*; the rest of finalize
hands the averages over, and counts as copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.arrivals import MatchedCollectives, match_collectives
from overlapscope.breakdown.spans import Int64Array, RowsByRank, SpansByRank, StepsByRank, merge_intervals, merge_spans
from overlapscope.breakdown.waits import LONG_AGO, REASONS, StartConditions, Waits, compute_waits, find_start_conditions
from overlapscope.trace.collective_arrival import compute_arrival_ns
from overlapscope.trace.recording import Trace
from overlapscope.trace.tables import PHASE_NAMES

# Timeline of one rank: each moment assigned to one owner, without gaps or overlaps.
#
# Several activities overlap: a garbage collection interrupts an optimizer, copies are a part of backward. A moment
# belongs to the claimant with the highest precedence. However the timeline is cut into spans, the shares of each span
# sum to its length.


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTimeline:
    """The owner of each moment: M segments between M + 1 edges, K claimants."""

    edges_ns: Int64Array
    """(M + 1,) Edges of the segments, ascending; empty if there are no claims."""
    owner: npt.NDArray[np.int8]
    """(M,) Number of the claimant that owns each segment; -1 for none."""
    claimants: int
    """Number of claimants, K."""

    def within(self, start_ns: npt.ArrayLike, end_ns: npt.ArrayLike) -> Int64Array:
        """Return how much of each span belongs to each claimant.

        Args:
            start_ns: (Q,) In any order; spans may overlap.
            end_ns: (Q,) A span that does not end after its start is empty.

        Returns:
            (Q, K + 1) Nanoseconds; the last column is time without an owner. Rows sum to the lengths of the spans.
        """
        start_ns, end_ns = (np.asarray(values, dtype=np.int64) for values in (start_ns, end_ns))
        end_ns = np.maximum(start_ns, end_ns)
        shares_ns = np.zeros((len(start_ns), self.claimants + 1), dtype=np.int64)
        if len(self.owner) and len(start_ns):
            near = self._between(int(start_ns.min()), int(end_ns.max()))
            before_ns = np.zeros((len(near.owner) + 1, self.claimants + 1), dtype=np.int64)
            before_ns[np.arange(1, len(near.owner) + 1), near.owner] = np.diff(near.edges_ns)
            np.cumsum(before_ns, axis=0, out=before_ns)
            until_ns = near._until(np.concatenate([start_ns, end_ns]), before_ns)
            shares_ns += until_ns[len(start_ns) :] - until_ns[: len(start_ns)]
        shares_ns[:, -1] = end_ns - start_ns - shares_ns[:, :-1].sum(axis=1)
        return shares_ns

    def spans_of(self, claimant: int) -> Int64Array:
        """Return the starts and ends (2, n) of the segments that a claimant owns, by time."""
        own = np.flatnonzero(self.owner == claimant)
        return np.stack([self.edges_ns[own], self.edges_ns[own + 1]])

    def _between(self, from_ns: int, to_ns: int) -> RankTimeline:
        """Return at least one segment, and all that are at least partly between two moments."""
        first = min(max(0, int(np.searchsorted(self.edges_ns, from_ns, side="right")) - 1), len(self.owner) - 1)
        after = max(first + 1, min(int(np.searchsorted(self.edges_ns, to_ns, side="left")), len(self.owner)))
        return replace(self, edges_ns=self.edges_ns[first : after + 1], owner=self.owner[first:after])

    def _until(self, time_ns: Int64Array, before_ns: Int64Array) -> Int64Array:
        """Return the time (Q, K + 1) owned by each claimant from the first edge to moments, which may lie outside."""
        time_ns = np.clip(time_ns, self.edges_ns[0], self.edges_ns[-1])
        piece = np.minimum(np.searchsorted(self.edges_ns, time_ns, side="right") - 1, len(self.owner) - 1)
        until_ns: Int64Array = before_ns.take(piece, axis=0)
        until_ns[np.arange(len(piece)), self.owner[piece]] += time_ns - self.edges_ns[piece]
        return until_ns


def assign_owners(number: npt.NDArray[np.int8], edges_ns: Int64Array, claimants: int) -> RankTimeline:
    """Assign every moment to the claimant with the lowest number.

    Example: claimant 1 from 0 to 20 and claimant 0 from 10 to 12 give edges [0, 10, 12, 20] and owners [1, 0, 1].

    Args:
        number: (n,) Claimant of each span, in any order; 0 has the highest precedence.
        edges_ns: (2, n) Start and end of each span.
        claimants: Number of claimants, at most 62.
    """
    # Spans of one claimant do not overlap after the union, so each edge toggles its bit.
    number, starts_ns, ends_ns = merge_intervals(number, *edges_ns)
    times_ns = np.concatenate([starts_ns, ends_ns])
    order = np.argsort(times_ns, kind="stable")
    times_ns = times_ns[order]
    claiming = np.bitwise_xor.accumulate(np.tile(np.left_shift(1, number, dtype=np.int64), 2)[order])[:-1]
    lasts = np.diff(times_ns) > 0
    begin_ns, claiming = times_ns[:-1][lasts], claiming[lasts]
    # The lowest set bit is a power of 2, whose exponent frexp gives exactly.
    owner = (np.frexp((claiming & -claiming).astype(np.float64))[1] - 1).astype(np.int8)
    changes = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    return RankTimeline(edges_ns=np.append(begin_ns[changes], times_ns[-1:]), owner=owner[changes], claimants=claimants)


BLOCKS: Final = (
    "data_wait",
    "host_loop",
    "buffers",
    "forward",
    "inter_phase",
    "backward",
    "exposed",
    "bucket_copies",
    "optimizer",
    "evaluation",
    "collectives",
    "gc",
    "unattributed",
)
"""Names of the blocks, in the usual order within a step. ``host_loop``: code of the training loop between an update
and the next forward. ``buffers``: broadcast of buffers. ``exposed``: communication that no other work hides.
``inter_phase``: outside all phases, such as the loss, between the first phase of a step and the last. ``collectives``:
collectives issued by user code. ``unattributed``: time without any record."""

COMPUTE_BLOCKS: Final = ("forward", "backward", "optimizer", "evaluation")
"""Blocks that count as compute."""

_PHASES: Final = ("finalize", "optimizer", "evaluation", "data_wait", "loop", "forward", "backward")
_HOST_CLAIMS: Final = ("gc", "bucket_copies", "buffers", "exposed", "collectives", *_PHASES, "inter_phase")
"""Claimants of a moment on the host, by precedence, highest first."""
_DEVICE_CLAIMS: Final = ("bucket_copies", "buffers", "exposed", *_PHASES, "collectives", "gc", "inter_phase")
"""The same where times are those of a device: what stops the host matters only where the device is idle."""
_BLOCK_OF: Final = {"finalize": "bucket_copies", "loop": "host_loop"}
_OPTIMIZER: Final = PHASE_NAMES.index("optimizer")


@dataclass(frozen=True, eq=False, kw_only=True)
class Breakdown:
    """Step-time breakdown of the finished steps of all ranks: G rows, in the order of ``trace.steps``, and W waits."""

    rank: Int64Array
    """(G,) Rank of each row."""
    step: Int64Array
    """(G,) Step number of each row."""
    start_ns: Int64Array
    """(G,) Start of the step, on the common clock."""
    end_ns: Int64Array
    """(G,) End of the step, on the common clock."""
    ns: Int64Array
    """(G, len(BLOCKS)) Time in each block; a row sums to ``end_ns - start_ns``."""
    hidden_ns: Int64Array
    """(G, len(BLOCKS)) Time for which gradients are communicated while other work runs, by the block of that work."""
    waits: Waits
    """The waits that exposed communication consists of, each within one step."""
    wait_row: Int64Array
    """(W,) Row of the step of each wait."""
    wait_ns: Int64Array
    """(W,) Exposed time of each wait: those of a step sum to its exposed communication. Shorter than the wait if it is
    interrupted."""
    straggler_ns: Int64Array
    """(W, len(BLOCKS)) What the straggler does during the wait; sums to the length of the wait, and to 0 for a wait
    without a straggler."""
    starts: StartConditions
    matched: MatchedCollectives
    timelines: dict[int, RankTimeline]
    """Timeline of each rank, whose owners are indices into ``BLOCKS``."""

    def exposed_spans_ns(self, rank: int) -> Int64Array:
        """Return the spans (2, n) in which a rank waits for communication that no other work hides.

        Times are on the common clock. The parts within a step sum to its exposed communication.
        """
        return self.timelines[rank].spans_of(BLOCKS.index("exposed"))


def compute_breakdown(trace: Trace) -> Breakdown:
    """Compute the step-time breakdown of a recording."""
    matched = match_collectives(trace)
    starts = find_start_conditions(trace, matched)
    rank, step, start_ns, end_ns = (
        trace.steps[name].to_numpy(np.int64) for name in ("rank", "step", "start_ns", "end_ns")
    )
    steps = StepsByRank(rank, start_ns, end_ns)
    whole = compute_waits(trace, starts)
    timelines = dict(_timelines(trace, whole))
    waits, wait_row = _cut_waits_at_steps(whole, steps)
    waits_ns = np.stack([waits.start_ns, waits.end_ns])
    ns, hidden_ns = np.zeros((2, len(rank), len(BLOCKS)), dtype=np.int64)
    wait_ns = np.zeros(len(waits.rank), dtype=np.int64)
    straggler_ns = np.zeros((len(waits.rank), len(BLOCKS)), dtype=np.int64)
    exposed = BLOCKS.index("exposed")
    sent_of, waits_of_rank, awaited_of = (
        get_communication_spans(trace.collectives),
        RowsByRank(waits.rank),
        RowsByRank(waits.straggler),
    )
    for one, timeline in timelines.items():
        row, steps_ns = steps.of_rank(one)
        sent = steps.cut(one, merge_spans(sent_of[one]))
        own, awaited = waits_of_rank[one], awaited_of[one]
        spans_ns_by_kind = [steps_ns, sent.edges_ns, waits_ns[:, own], waits_ns[:, awaited]]
        # One call for all spans, because each call takes running sums over the whole timeline.
        shares_ns = timeline.within(*np.concatenate(spans_ns_by_kind, axis=1))
        begins = np.cumsum([spans_ns.shape[1] for spans_ns in spans_ns_by_kind[:-1]])
        ns[row], sent_ns, exposed_ns, straggler_ns[awaited] = np.split(shares_ns, begins)
        _add_to_rows(hidden_ns, sent.row, sent_ns)
        wait_ns[own] = exposed_ns[:, exposed]
    hidden_ns[:, exposed] = 0
    return Breakdown(
        rank=rank,
        step=step,
        start_ns=start_ns,
        end_ns=end_ns,
        ns=ns,
        hidden_ns=hidden_ns,
        waits=waits,
        wait_row=wait_row,
        wait_ns=wait_ns,
        straggler_ns=straggler_ns,
        starts=starts,
        matched=matched,
        timelines=timelines,
    )


def tabulate_breakdown(breakdown: Breakdown) -> pd.DataFrame:
    """Return a table of all steps of all ranks, in the order of ``trace.steps``.

    Returns:
        rank, step, step_time_ns, a column for each of ``BLOCKS`` (these sum to the step time), one for each of
        ``REASONS`` (exposed_<reason>_ns; these sum to exposed_ns), compute_ns (sum of ``COMPUTE_BLOCKS``), hidden_ns
        (time for which gradients are communicated while other work runs), communication_ns (hidden plus exposed),
        overlap_ratio (hidden over communication; NaN without communication).
    """
    blocks_ns = {f"{name}_ns": breakdown.ns[:, index] for index, name in enumerate(BLOCKS)}
    for_reason_ns = np.zeros(len(REASONS) * len(breakdown.rank), dtype=np.int64)
    # Before numpy 2, an array of 8 bits times a number of 64 has 8 bits.
    reason = breakdown.waits.reason.astype(np.int64)
    np.add.at(for_reason_ns, reason * len(breakdown.rank) + breakdown.wait_row, breakdown.wait_ns)
    hidden_ns = breakdown.hidden_ns.sum(axis=1)
    communication_ns = hidden_ns + blocks_ns["exposed_ns"]
    nothing = np.full(len(hidden_ns), np.nan)
    return pd.DataFrame(
        {
            "rank": breakdown.rank,
            "step": breakdown.step,
            "step_time_ns": breakdown.end_ns - breakdown.start_ns,
            **blocks_ns,
            **{
                f"exposed_{reason}_ns": ns
                for reason, ns in zip(REASONS, for_reason_ns.reshape(len(REASONS), -1), strict=True)
            },
            "compute_ns": np.sum([blocks_ns[f"{name}_ns"] for name in COMPUTE_BLOCKS], axis=0),
            "hidden_ns": hidden_ns,
            "communication_ns": communication_ns,
            "overlap_ratio": np.divide(hidden_ns, communication_ns, out=nothing, where=communication_ns > 0),
        },
        copy=False,
    )


def _cut_waits_at_steps(whole: Waits, steps: StepsByRank) -> tuple[Waits, Int64Array]:
    """Cut waits at step boundaries; return the parts within steps and the row of the step of each."""
    spans_of = SpansByRank(whole.rank, whole.start_ns, whole.end_ns)
    number = np.arange(len(whole.rank))
    found = [(number[:0], number[:0], np.zeros((2, 0), dtype=np.int64))]
    for rank in spans_of.rows.ranks:
        parts = steps.cut(rank, spans_of[rank])
        found.append((number[spans_of.rows[rank]][parts.which], parts.row, parts.edges_ns))
    which, row, (from_ns, until_ns) = (np.concatenate(columns, axis=-1) for columns in zip(*found, strict=True))
    return replace(whole.of(which), start_ns=from_ns, end_ns=until_ns), row


def _add_to_rows(totals_ns: Int64Array, row: Int64Array, ns: Int64Array) -> None:
    """Add values (n, K) to rows (n,) of totals (G, K); a row may occur several times.

    Example: with K = 2, rows [1, 1] and values [[1, 2], [3, 4]], row 1 grows by [4, 6].
    """
    columns = totals_ns.shape[1]
    # numpy is several times faster in one dimension.
    np.add.at(totals_ns.reshape(-1), (row[:, None] * columns + np.arange(columns)).ravel(), ns.ravel())


def _timelines(trace: Trace, waits: Waits) -> Iterator[tuple[int, RankTimeline]]:
    """Yield each rank and its timeline, painted by the precedence of its device."""
    buffers = trace.collectives[(trace.collectives["op"] == "broadcast") & trace.collectives["end_ns"].notna()]
    phases, steps = SpansByRank.of(trace.phases), SpansByRank.of(trace.steps)
    phase = trace.phases["phase"].cat.set_categories(PHASE_NAMES).cat.codes.to_numpy()
    others = {"gc": SpansByRank.of(trace.pauses), "bucket_copies": SpansByRank.of(trace.copies)}
    others |= {"collectives": SpansByRank.of(trace.user_collectives)}
    others |= {"buffers": SpansByRank.of(buffers.assign(start_ns=compute_arrival_ns(buffers)))}
    ranks_and_edges = zip((waits.rank, waits.start_ns, waits.end_ns), _find_endless_waits(trace), strict=True)
    others |= {"exposed": SpansByRank(*(np.concatenate(columns) for columns in ranks_and_edges))}
    others = {name: spans for name, spans in others.items() if spans.rows.ranks}
    for rank, device in zip(trace.ranks["rank"].tolist(), trace.ranks["device"].astype(str), strict=True):
        claims = _DEVICE_CLAIMS if device.startswith("cuda") else _HOST_CLAIMS
        phases_ns, own_phase = phases[rank], phase[phases.rows[rank]]
        spans_ns = {name: spans[rank] for name, spans in others.items()}
        spans_ns["inter_phase"] = _phase_hulls(phases_ns, steps[rank])
        number = [np.array([claims.index(name) for name in PHASE_NAMES], np.int8)[own_phase]]
        number += [np.full(own_ns.shape[1], claims.index(name), np.int8) for name, own_ns in spans_ns.items()]
        edges_ns = np.concatenate([phases_ns, *spans_ns.values()], axis=1)
        timeline = assign_owners(np.concatenate(number), edges_ns, len(claims))
        block_of = _BLOCK_OF
        if not (own_phase == _OPTIMIZER).any():  # the end of a user-defined update is unknown
            block_of = _BLOCK_OF | {"loop": "inter_phase"}
        block = np.array([BLOCKS.index(block_of.get(name, name)) for name in claims] + [len(BLOCKS) - 1], np.int8)
        yield rank, replace(timeline, owner=block[timeline.owner], claimants=len(BLOCKS) - 1)


def _find_endless_waits(trace: Trace) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return rank, start and end of the waits for buckets that never ended, in steps that were never finished."""
    finals = trace.phases.loc[trace.phases["phase"] == "finalize", ["rank", "model", "step", "start_ns", "end_ns"]]
    is_endless = (trace.collectives["bucket"] >= 0) & trace.collectives["end_ns"].isna()
    launches = trace.collectives[is_endless].groupby(["rank", "model", "step"], as_index=False)["launch_ns"].min()
    if not len(finals) or not len(launches):
        return (np.zeros(0, dtype=np.int64),) * 3
    waits = finals.merge(launches, on=["rank", "model", "step"])
    waits = waits.merge(trace.steps[["rank", "step"]], on=["rank", "step"], how="left", indicator="known")
    waits = waits[waits["known"] == "left_only"]
    rank, start_ns, launch_ns, end_ns = (
        waits[name].to_numpy(np.int64) for name in ("rank", "start_ns", "launch_ns", "end_ns")
    )
    return rank, np.maximum(start_ns, launch_ns), end_ns


def _phase_hulls(phases_ns: Int64Array, steps_ns: Int64Array) -> Int64Array:
    """Return, for each step of a rank, the span from its first phase to the end of its last one (2, n).

    Example: a step from 0 to 100 ns with phases from 10 to 40 and from 60 to 90 gives the span from 10 to 90.
    """
    steps_ns = steps_ns[:, np.argsort(steps_ns[0], kind="stable")]
    index = np.searchsorted(steps_ns[1], phases_ns[0], side="right")
    inside = index < steps_ns.shape[1]
    index, phases_ns = index[inside], phases_ns[:, inside]
    first_ns, last_ns = steps_ns[1].copy(), steps_ns[0].copy()
    np.minimum.at(first_ns, index, phases_ns[0])
    np.maximum.at(last_ns, index, phases_ns[1])
    return np.stack([np.maximum(first_ns, steps_ns[0]), np.minimum(last_ns, steps_ns[1])])


def get_communication_spans(table: pd.DataFrame) -> SpansByRank:
    """Return the spans in which gradients are communicated, of a table of collectives."""
    reduced = np.flatnonzero((table["bucket"] >= 0) & table["end_ns"].notna())
    rank, launch_ns = (table[name].to_numpy(np.int64)[reduced] for name in ("rank", "launch_ns"))
    start_ns, end_ns = (table[name].to_numpy(np.int64, na_value=LONG_AGO)[reduced] for name in ("start_ns", "end_ns"))
    return SpansByRank(rank, np.where(start_ns == LONG_AGO, launch_ns, start_ns), end_ns)
