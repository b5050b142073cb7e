"""What a collective is launched for: said by those who launch it, around the launch."""

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
    """What a collective is launched for, known to those who launch it."""

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
    """In this group; None: in any."""
    launched: Callable[[dist.Work], OnEnd | None] | None = None
    """Called with its work; returns who is to be told of its end, on the host."""
    is_awaited: bool = False
    """On the host: who launches it goes on when it is over."""


class _Purposes(threading.local):
    current: Launch | None = None


_purposes: Final = _Purposes()
_of_groups: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, Purpose]] = weakref.WeakKeyDictionary()


@contextmanager
def launched_for(what: Purpose | Launch | None) -> Iterator[None]:
    """What this thread launches inside is for this purpose, or this launch; None: for that which holds already."""
    before = _purposes.current
    if what is not None:
        _purposes.current = what if isinstance(what, Launch) else Launch(purpose=what)
    try:
        yield
    finally:
        _purposes.current = before


def keep_for(group: dist.ProcessGroup, purpose: Purpose) -> None:
    """Whatever is launched in a group is for this purpose.

    For torch's hooks: what they launch in callbacks comes from whichever thread has seen an earlier part end.
    """
    _of_groups[group] = purpose


def purpose_of_group(group: dist.ProcessGroup) -> Purpose | None:
    """What a group was kept for, if it was."""
    return _of_groups.get(group)


def current_launch() -> Launch | None:
    """What this thread launches now, as far as it has said so."""
    return _purposes.current
