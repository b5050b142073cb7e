"""Declared purposes of collectives: context managers around the launch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from instrumented_ddp.collective_log.device_completion import OnEnd
from overlapscope.trace.signature import NO_BUCKET


@dataclass(frozen=True, kw_only=True)
class Purpose:
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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A collective that is about to be launched."""

    purpose: Purpose
    group: dist.ProcessGroup | None = None
    """Group in which it is launched; None for any."""
    launched: Callable[[dist.Work], OnEnd | None] | None = None
    """Called with its work; returns the callback for its end, on the host."""
    is_awaited: bool = False
    """True if, on the host, the launching code continues only when it has ended."""


class _Purposes(threading.local):
    current: Launch | None = None


_purposes: Final = _Purposes()
_of_groups: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, Purpose]] = weakref.WeakKeyDictionary()


@contextmanager
def launched_for(what: Purpose | Launch | None) -> Iterator[None]:
    """Declare the purpose of collectives that this thread launches inside; None keeps the current one."""
    before = _purposes.current
    if what is not None:
        _purposes.current = what if isinstance(what, Launch) else Launch(purpose=what)
    try:
        yield
    finally:
        _purposes.current = before


def keep_for(group: dist.ProcessGroup, purpose: Purpose) -> None:
    """Declare the purpose of everything that is launched in a group.

    Needed for torch's hooks: their callbacks launch collectives on whichever thread saw an earlier part end.
    """
    _of_groups[group] = purpose


def purpose_of_group(group: dist.ProcessGroup) -> Purpose | None:
    """Return the purpose declared for a group, if any."""
    return _of_groups.get(group)


def current_launch() -> Launch | None:
    """Return the declared launch of this thread, if any."""
    return _purposes.current
