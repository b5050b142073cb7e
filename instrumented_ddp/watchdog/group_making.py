"""What ``torch.distributed`` knows of process groups that are still being made, and that no log is of yet."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Final

from torch.distributed import distributed_c10d

_MAKES_GROUP: Final = "_new_group_with_tag"


def groups_made() -> int | None:
    """How many process groups this rank has begun to make; None if this torch does not say."""
    count = getattr(getattr(distributed_c10d, "_world", None), "group_count", None)
    return count if isinstance(count, int) else None


def group_in_the_making(frames: Iterable[FrameType]) -> tuple[int, ...]:
    """The members of the group that a thread is making; none if it makes none, or its members are not known.

    Args:
        frames: of the thread.
    """
    for frame in frames:
        if frame.f_code.co_name != _MAKES_GROUP or frame.f_globals.get("__name__") != distributed_c10d.__name__:
            continue
        ranks = frame.f_locals.get("ranks")
        if frame.f_locals.get("use_local_synchronization") or not isinstance(ranks, list):
            return ()  # such groups are not counted
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()
