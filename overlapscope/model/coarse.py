"""A model of thousands of gradients with neighbours joined, so that plans are found as quickly as for a small one.

Gradients are joined if they are of one kind, follow each other and are small compared with the model; where between
them a bucket is closed makes no measurable difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.model.partition import ALONE, Buckets, Gradients
from overlapscope.model.work import Work

_MOST_GRADIENTS: Final = 500
"""Models with no more than these stay as they are."""
_PIECES: Final = 400
"""A joined gradient holds at most one in this many parts of the model, unless one of its members holds more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Coarse:
    """The joined gradients and their work."""

    work: Work
    members: tuple[tuple[int, ...], ...]
    """The numbers of the gradients that each was joined from, in their order."""

    def expanded(self, buckets: Buckets) -> Buckets:
        """A plan in numbers of the model's own gradients."""
        return tuple(tuple(number for joined in bucket for number in self.members[joined]) for bucket in buckets)


def coarse(work: Work) -> Coarse | None:
    """Join gradients; None if there are few enough."""
    gradients = work.gradients
    if len(gradients.order) <= _MOST_GRADIENTS:
        return None
    kinds, sizes = gradients.kinds.tolist(), gradients.bytes.tolist()
    enough = gradients.total_bytes / _PIECES
    filling: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    joined: list[tuple[int, ...]] = []
    for number in gradients.order.tolist():
        kind, size = kinds[number], sizes[number]
        if kind == ALONE:
            joined.append((number,))
            continue
        if kind in filling and filled[kind] + size > enough:
            joined.append(tuple(filling.pop(kind)))
            filled[kind] = 0
        filling.setdefault(kind, []).append(number)
        filled[kind] = filled.get(kind, 0) + size
    joined += [tuple(members) for members in filling.values()]
    place = np.empty(len(gradients.order), dtype=np.int64)
    place[gradients.order] = np.arange(len(gradients.order))
    joined.sort(key=lambda members: place[members[-1]])
    last = np.array([members[-1] for members in joined])
    return Coarse(
        work=replace(
            work,
            gradients=Gradients(
                names=tuple(gradients.names[number] for number in last),
                bytes=np.array([sum(sizes[number] for number in members) for members in joined], dtype=np.int64),
                kinds=gradients.kinds[last],
                order=np.arange(len(joined)),
            ),
            ready_ns=work.ready_ns[:, :, place[last]],
        ),
        members=tuple(joined),
    )
