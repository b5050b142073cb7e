"""Information from ``torch.distributed`` about process groups under construction, which have no log yet."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Final

from torch.distributed import distributed_c10d

_MAKES_GROUP: Final = "_new_group_with_tag"


def count_created_groups() -> int | None:
    """Return the number of process groups that this rank has begun to create; None if this torch does not expose it."""
    count = getattr(getattr(distributed_c10d, "_world", None), "group_count", None)
    return count if isinstance(count, int) else None


def ranks_of_group_in_creation(frames: Iterable[FrameType]) -> tuple[int, ...]:
    """Return the ranks of the group that a thread is creating; empty if it creates none, or its ranks are unknown.

    Args:
        frames: stack frames of the thread.
    """
    for frame in frames:
        if frame.f_code.co_name != _MAKES_GROUP or frame.f_globals.get("__name__") != distributed_c10d.__name__:
            continue
        ranks = frame.f_locals.get("ranks")
        if frame.f_locals.get("use_local_synchronization") or not isinstance(ranks, list):
            return ()  # such groups are not counted
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()
