"""Categories of collectives for coloring: buckets, other collectives of DDP, and the user's own by operation."""

from __future__ import annotations

from typing import Final

from overlapscope.trace.signature import Signature

BUCKET_SLOTS: Final = 8
"""Number of colors that buckets cycle through, as on the timeline."""

_OF_DDP: Final = ("buffers", "bitmap", "construction", "join", "hook")
_OF_USER: Final = ("all_reduce", "broadcast", "gather", "scatter", "reduce", "barrier", "other")
CATEGORIES: Final = (*(f"bucket_{slot}" for slot in range(BUCKET_SLOTS)), *_OF_DDP, *_OF_USER)
"""Names of the categories, by number."""

_FAMILIES: Final = {
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "scatter",
    "monitored_barrier": "barrier",
}


def collective_category(signature: Signature) -> int:
    """Return the number of a collective's category."""
    if signature.role == "bucket":
        return max(0, signature.bucket) % BUCKET_SLOTS
    if signature.role in _OF_DDP:
        return CATEGORIES.index(signature.role)
    family = _FAMILIES.get(signature.op, signature.op)
    return CATEGORIES.index(family if family in _OF_USER else "other")
