"""What a collective is launched for: said by those who launch it, around the launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

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
    flags: int = 0
    """See ``overlapscope.trace.group_log``."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A collective that is launched by code that can't say what for."""

    purpose: Purpose
    launched: Callable[[dist.Work], None] | None = None
    """Called with its work."""


class _Purposes(threading.local):
    current: Purpose | None = None


_purposes: Final = _Purposes()


@contextmanager
def launched_for(purpose: Purpose | None) -> Iterator[None]:
    """What this thread launches inside is for this purpose; None: for that which holds already."""
    before = _purposes.current
    if purpose is not None:
        _purposes.current = purpose
    try:
        yield
    finally:
        _purposes.current = before


def current_purpose() -> Purpose | None:
    """Of what this thread launches now."""
    return _purposes.current
