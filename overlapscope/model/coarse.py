"""Merging of neighboring gradients, so that plans for thousands of gradients are found as quickly as for a small model.

Gradients are merged if they are of one kind, consecutive, and small compared with the model, so that closing a bucket
between them would make no measurable difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.model.partition import SPARSE_KIND, Buckets, Gradients
from overlapscope.model.work import ComputeTimes

_MAX_GRADIENTS: Final = 500
"""Models with at most this many gradients are left unchanged."""
_MERGED_PARTS: Final = 400
"""Merged gradients hold at most 1/400 of the model's bytes each, unless a single member is larger."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MergedGradients:
    """Work on merged gradients, and the gradients that each one consists of."""

    work: ComputeTimes
    members: tuple[tuple[int, ...], ...]
    """Original gradient indices merged into each coarse gradient, in order."""

    def expand_plan(self, buckets: Buckets) -> Buckets:
        """Translate a plan on merged gradients to one on the original gradients."""
        return tuple(tuple(number for joined in bucket for number in self.members[joined]) for bucket in buckets)


def merge_gradients(work: ComputeTimes) -> MergedGradients | None:
    """Merge small consecutive gradients; return None if there are few enough."""
    gradients = work.gradients
    if len(gradients.order) <= _MAX_GRADIENTS:
        return None
    kinds, sizes = gradients.kinds.tolist(), gradients.bytes.tolist()
    enough = gradients.total_bytes / _MERGED_PARTS
    filling: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    joined: list[tuple[int, ...]] = []
    for number in gradients.order.tolist():
        kind, size = kinds[number], sizes[number]
        if kind == SPARSE_KIND:
            joined.append((number,))
            continue
        if kind in filling and filled[kind] + size > enough:
            joined.append(tuple(filling.pop(kind)))
            filled[kind] = 0
        filling.setdefault(kind, []).append(number)
        filled[kind] = filled.get(kind, 0) + size
    joined += [tuple(members) for members in filling.values()]
    position = np.empty(len(gradients.order), dtype=np.int64)
    position[gradients.order] = np.arange(len(gradients.order))
    joined.sort(key=lambda members: position[members[-1]])
    last = np.array([members[-1] for members in joined])
    return MergedGradients(
        work=replace(
            work,
            gradients=Gradients(
                names=tuple(gradients.names[number] for number in last),
                bytes=np.array([sum(sizes[number] for number in members) for members in joined], dtype=np.int64),
                kinds=gradients.kinds[last],
                order=np.arange(len(joined)),
            ),
            ready_ns=work.ready_ns[:, :, position[last]],
        ),
        members=tuple(joined),
    )
