"""Declared purposes of collectives: context managers around the launch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch.distributed as dist

from overlapscope.trace.schema import NO_BUCKET

OnEnd = Callable[[int, bool], None]
"""Callback for an end: when it was seen, in host nanoseconds, and whether the collective has failed."""


class HostBucket(Protocol):
    """A bucket whose collective runs on the host's threads."""

    running_ns: int
    """Time at which it was last seen running, on the host clock."""
    is_waited_for: bool
    """True if a thread waits for its end, false if the training sees it in passing."""
    watched: Any
    """What ``CompletionWatch`` knows it by; None if its end is not reported."""

    def ended(self, now_ns: int, failed: bool) -> None:
        """Note that its end was seen."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRole:
    """Purpose of a collective, declared by the code that launches it."""

    role: str
    """See ``Signature.role``."""
    model: int = 0
    plan_epoch: int = 0
    plan_hash: str = ""
    bucket: int = NO_BUCKET
    strategy: str = ""
    phase: str = ""
    round: int = 0
    rounds: int = 0


@dataclass(slots=True, kw_only=True)
class Launch:
    """A collective that is about to be launched."""

    purpose: CollectiveRole
    group: dist.ProcessGroup | None = None
    """Group in which it is launched; None for any."""
    launched: Callable[[dist.Work], HostBucket | None] | None = None
    """Called with its work; returns the bucket that is told of its end, on the host."""
    is_awaited: bool = False
    """True if, on the host, the launching code continues only when it has ended."""
    is_reducer: bool = False
    """True if a reducer launches it, which always sums and uses no function of ``torch.distributed``."""
    is_users: bool = False
    """True if the user's code launches it: its purpose is not logged, as other ranks may not know it."""


class _LaunchContext(threading.local):
    current: Launch | None = None


_context: Final = _LaunchContext()
_group_roles: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveRole]] = weakref.WeakKeyDictionary()


@contextmanager
def collective_context(what: CollectiveRole | Launch | None) -> Iterator[None]:
    """Declare the purpose of collectives that this thread launches inside; None keeps the current one."""
    before = _context.current
    if what is not None:
        _context.current = what if isinstance(what, Launch) else Launch(purpose=what)
    try:
        yield
    finally:
        _context.current = before


def set_group_role(group: dist.ProcessGroup, purpose: CollectiveRole) -> None:
    """Declare the purpose of everything that is launched in a group.

    Needed for torch's hooks: their callbacks launch collectives on whichever thread saw an earlier part end.
    """
    _group_roles[group] = purpose


def get_group_role(group: dist.ProcessGroup) -> CollectiveRole | None:
    """Return the purpose declared for a group, if any."""
    return _group_roles.get(group)


def current_launch() -> Launch | None:
    """Return the declared launch of this thread, if any."""
    return _context.current
