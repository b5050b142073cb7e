"""Bucket plans of one recorded model, by epoch, with gradients numbered without gaps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from overlapscope.model.partition import Buckets, Float64Array, Gradients, Int64Array
from overlapscope.trace.reader import Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedPlans:
    """The plans of one model.

    A gradient is identified by its *index* among reduced gradients, in the order of parameters.
    """

    numbers: Int64Array
    """(P,) Numbers of the parameters, ascending."""
    buckets: dict[int, Buckets]
    """Buckets by epoch, as gradient indices."""
    bytes: Int64Array
    """(P,) Size of each gradient in bytes."""
    names: tuple[str, ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, trace: Trace, model: int) -> RecordedPlans:
        """Read the plans of one model; empty if none was recorded."""
        table = trace.plans[trace.plans["model"] == model]
        rows = table.drop_duplicates(["plan_epoch", "bucket", "position"])
        rows = rows.sort_values(["plan_epoch", "bucket", "position"])
        numbers, latest = np.unique(rows["parameter"].to_numpy(dtype=np.int64)[::-1], return_index=True)
        described = rows.iloc[len(rows) - 1 - latest]
        index = np.searchsorted(numbers, rows["parameter"].to_numpy(dtype=np.int64))
        epoch, bucket = rows["plan_epoch"].to_numpy(dtype=np.int64), rows["bucket"].to_numpy(dtype=np.int64)
        starts = np.flatnonzero(np.diff(epoch, prepend=-1) | np.diff(bucket, prepend=-1))
        buckets: dict[int, list[tuple[int, ...]]] = {}
        for first, end in pairwise([*starts.tolist(), len(rows)]):
            buckets.setdefault(int(epoch[first]), []).append(tuple(index[first:end].tolist()))
        return cls(
            numbers=numbers,
            buckets={epoch: tuple(plan) for epoch, plan in buckets.items()},
            bytes=described["bytes"].to_numpy(dtype=np.int64),
            names=tuple(described["name"].astype(str)),
            dtypes=tuple(described["dtype"].astype(str)),
        )

    def gradients(self, epoch: int, ready_ns: Float64Array) -> Gradients:
        """Return the reduced gradients in the order in which DDP fills buckets with them: that of one plan.

        If there are several types, each with its own buckets, gradients of different types are ordered by when they
        were ready.

        Args:
            ready_ns: (R, S, P) When each was ready; NaN where that is unknown.
        """
        order = np.array([index for bucket in self.buckets[epoch] for index in bucket], dtype=np.int64)
        kinds = np.unique(self.dtypes, return_inverse=True)[1].astype(np.int64)
        is_known = ~np.isnan(ready_ns).all(axis=(0, 1))
        moment_ns = np.full(len(self.numbers), np.inf)
        moment_ns[is_known] = np.nanmedian(ready_ns[:, :, is_known], axis=(0, 1))
        moment_ns = moment_ns[order]
        for kind in np.unique(kinds):
            of_kind = np.flatnonzero(kinds[order] == kind)
            # A gradient without a time takes that of the next with one; one that is ready early still waits for those
            # before it.
            next_ns = np.minimum.accumulate(moment_ns[of_kind][::-1])[::-1]
            own_ns = np.where(np.isfinite(moment_ns[of_kind]), moment_ns[of_kind], next_ns)
            moment_ns[of_kind] = np.maximum.accumulate(own_ns)
        return Gradients(
            names=self.names, bytes=self.bytes, kinds=kinds, order=order[np.argsort(moment_ns, kind="stable")]
        )
