"""Many bucket plans of one model as arrays, to be replayed together.

A plan can be expressed by its *cuts*: for each gradient, in order, True if it is the last one of its bucket. That fully
describes a plan that fills buckets in the order of gradients, as DDP's do. Example: for gradients in the order 3, 2, 1,
0, the plan ((3, 2), (1, 0)) has the cuts False, True, False, True.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlapscope.bucket_model.partition import SPARSE_KIND, BoolArray, Buckets, Gradients, Int64Array


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanTable:
    """Arrays of Q plans with at most B buckets each; shorter plans are padded with empty buckets."""

    last: Int64Array
    """(Q, B) position, in the order of gradients, up to which all must be ready for a bucket to be launched."""
    bytes: Int64Array
    """(Q, B) bytes of each bucket; 0 for padding."""
    is_bucket: BoolArray
    """(Q, B) True for buckets, False for padding."""

    def __len__(self) -> int:
        return len(self.last)

    def select(self, rows: Int64Array) -> PlanTable:
        """Select some of the plans, in the narrowest possible table."""
        width = int(self.is_bucket[rows].sum(axis=1).max(initial=0))
        return PlanTable(
            last=self.last[rows, :width], bytes=self.bytes[rows, :width], is_bucket=self.is_bucket[rows, :width]
        )


def build_table(plans: Sequence[Buckets], gradients: Gradients) -> PlanTable:
    """Build a table of any plans, including those that don't fill buckets in the order of gradients.

    Example: with four gradients of 4 bytes in the order 3, 2, 1, 0, the plan ((3,), (2, 1, 0)) has ``last`` 0, 3 and
    ``bytes`` 4, 12.
    """
    position = np.empty(len(gradients.order), dtype=np.int64)
    position[gradients.order] = np.arange(len(gradients.order))
    row = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
    buckets = [bucket for plan in plans for bucket in plan]
    members = np.concatenate([np.asarray(bucket, dtype=np.int64) for bucket in buckets])
    first = np.cumsum([0] + [len(bucket) for bucket in buckets[:-1]])
    table = _pack(
        len(plans), row, np.maximum.reduceat(position[members], first), np.add.reduceat(gradients.bytes[members], first)
    )
    np.maximum.accumulate(table.last, axis=1, out=table.last)  # a bucket waits for the previous ones
    return table


def build_table_from_cuts(cuts: BoolArray, gradients: Gradients) -> PlanTable:
    """Build a table of the plans with these cuts.

    Args:
        cuts: (Q, P) by position in the order of gradients; the last gradient of each kind need not be marked.
    """
    cuts = cuts | forced_cuts(gradients)
    bytes_, kinds = gradients.bytes[gradients.order], gradients.kinds[gradients.order]
    rows, lasts, sizes = [], [], []
    for kind in np.unique(kinds):
        of_kind = np.flatnonzero(kinds == kind)
        filled = np.cumsum(bytes_[of_kind])
        row, last = np.nonzero(cuts[:, of_kind])
        before = np.concatenate([[0], filled[last[:-1]]])
        before[np.diff(row, prepend=-1) > 0] = 0
        rows.append(row)
        lasts.append(of_kind[last])
        sizes.append(filled[last] - before)
    row, last, size = np.concatenate(rows), np.concatenate(lasts), np.concatenate(sizes)
    in_order = np.lexsort((last, row))
    return _pack(len(cuts), row[in_order], last[in_order], size[in_order])


def forced_cuts(gradients: Gradients) -> BoolArray:
    """Return (P,) True for the gradients, in their order, that end a bucket in every plan."""
    kinds = gradients.kinds[gradients.order]
    forced: BoolArray = kinds == SPARSE_KIND
    for kind in np.unique(kinds):
        forced[np.flatnonzero(kinds == kind)[-1]] = True
    return forced


def buckets_from_cuts(cuts: BoolArray, gradients: Gradients) -> Buckets:
    """Build the plan with these cuts (P,)."""
    cuts = cuts | forced_cuts(gradients)
    filling: dict[int, list[int]] = {}
    buckets: list[tuple[int, ...]] = []
    for number, is_cut in zip(gradients.order.tolist(), cuts.tolist(), strict=True):
        kind = int(gradients.kinds[number])
        filling.setdefault(kind, []).append(number)
        if is_cut:
            buckets.append(tuple(filling.pop(kind)))
    return tuple(buckets)


def cuts_from_buckets(buckets: Buckets, gradients: Gradients) -> BoolArray | None:
    """Compute the cuts (P,) of a plan; None if it does not fill buckets in the order of gradients."""
    is_last = np.zeros(len(gradients.order), dtype=bool)
    is_last[[bucket[-1] for bucket in buckets]] = True
    cuts: BoolArray = is_last[gradients.order]
    return cuts if buckets_from_cuts(cuts, gradients) == buckets else None


def _pack(plans: int, row: Int64Array, last: Int64Array, bytes_: Int64Array) -> PlanTable:
    counts = np.bincount(row, minlength=plans)
    width = int(counts.max(initial=0))
    is_bucket = np.arange(width) < counts[:, None]
    table = PlanTable(
        last=np.zeros(is_bucket.shape, dtype=np.int64),
        bytes=np.zeros(is_bucket.shape, dtype=np.int64),
        is_bucket=is_bucket,
    )
    table.last[is_bucket] = last
    table.bytes[is_bucket] = bytes_
    return table
