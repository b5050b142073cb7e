"""DDP's rule for assigning gradients to buckets, used by ``instrumented_ddp`` to train and by the model to predict."""

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
