"""Partitions of gradients into buckets: DDP's rule, for training and for predictions, and many plans as arrays.

A plan can be expressed by its *cuts*: for each gradient, in order, True if it is the last one of its bucket. That fully
describes a plan that fills buckets in the order of gradients, as DDP's do. Example: for gradients in the order 3, 2, 1,
0, the plan ((3, 2), (1, 0)) has the cuts False, True, False, True.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Buckets = tuple[tuple[int, ...], ...]
"""A bucket plan: buckets in the order in which they are launched, each a tuple of parameter indices."""

MB: Final = 1024**2
"""Bytes per MB, as in DDP's ``bucket_cap_mb``."""

NO_LIMIT: Final = sys.maxsize
"""A limit that no bucket reaches."""

SPARSE_KIND: Final = -1
"""Kind of a gradient that needs a bucket for itself, because it is sparse."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Gradients:
    """The P gradients that one model reduces in a step, by parameter index."""

    names: tuple[str, ...]
    bytes: Int64Array
    """(P,) bytes of each gradient."""
    kinds: Int64Array
    """(P,) kind of each gradient: those of one dtype and device have the same number and can share a bucket;
    ``SPARSE_KIND`` for a sparse one."""
    order: Int64Array
    """(P,) parameter indices, first ready gradient first."""

    @property
    def total_bytes(self) -> int:
        """Return the total bytes of all gradients."""
        return int(self.bytes.sum())


def fill_buckets(bytes_: Sequence[int], kinds: Sequence[int], order: Sequence[int], limits: Sequence[int]) -> Buckets:
    """Fill buckets with gradients of one kind, in the order in which they are expected.

    A bucket is closed once it holds its limit or more, so it may exceed the limit by one gradient (the rule of
    ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp). Buckets are ordered by their last
    gradient: that is the order in which they become ready.

    Example: four gradients of 4 bytes each in the order 3, 2, 1, 0, with limits of 4 and 8 bytes, give ((3,), (2, 1),
    (0,)).

    Args:
        bytes_: (P,) by parameter index.
        kinds: (P,) see ``Gradients.kinds``.
        order: Parameter indices, first gradient first.
        limits: Bytes of the first bucket of each kind, of the second and so on; the last limit applies to all further
            ones.
    """
    filling: dict[int, list[int]] = {}
    filled_bytes: dict[int, int] = {}
    ordinals: dict[int, int] = {}
    buckets: list[list[int]] = []
    for index in order:
        kind = kinds[index]
        if kind == SPARSE_KIND:
            buckets.append([index])
            continue
        filling.setdefault(kind, []).append(index)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + bytes_[index]
        ordinal = ordinals.setdefault(kind, 0)
        if filled_bytes[kind] >= limits[ordinal]:
            buckets.append(filling.pop(kind))
            del filled_bytes[kind]
            ordinals[kind] = min(ordinal + 1, len(limits) - 1)
    buckets += filling.values()
    position = {index: ordinal for ordinal, index in enumerate(order)}
    buckets.sort(key=lambda bucket: position[bucket[-1]])
    return tuple(tuple(bucket) for bucket in buckets)


def fill_plan(gradients: Gradients, limits_bytes: Sequence[int]) -> Buckets:
    """Return the plan that DDP makes of these gradients after the rebuild; see ``fill_buckets``."""
    return fill_buckets(gradients.bytes.tolist(), gradients.kinds.tolist(), gradients.order.tolist(), limits_bytes)


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
