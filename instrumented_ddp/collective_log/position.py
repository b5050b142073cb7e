"""Where this rank is in its training, in one small object: written by who follows the training, read by who reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from overlapscope.trace.format import NO_CALL_SITE, Phase
from overlapscope.trace.group_log import SHADOW, UNEVEN_INPUTS, UNKNOWN, UNKNOWN_PHASE
from overlapscope.trace.host import host_now_ns


@dataclass(slots=True, kw_only=True)
class Position:
    """Where this rank is.

    The recorder (or, without DDP, the count of optimizer steps) writes it; the collective log puts it into every
    entry, and the watchdog tells the other ranks.
    """

    step: int = 0
    """Optimizer step that the host is in."""
    phase: int = UNKNOWN_PHASE
    """A ``Phase``, or ``UNKNOWN_PHASE``."""
    since_ns: int = 0
    """Host: when the phase began; 0 if phases are not followed."""
    batch: int = UNKNOWN
    """How far this rank is in its data, as of its newest training forward."""
    flags: int = 0
    """Of all entries from now on, see ``overlapscope.trace.group_log``."""
    backward_call_site: int = NO_CALL_SITE
    """Call site of what DDP launches during a backward."""
    no_sync_since: int | None = None
    """The step from which on all backwards were under ``no_sync()``; None if the newest step to end was reduced."""
    has_updated: bool = False
    """Whether ``step`` follows an update, and no training forward has begun it."""
    has_phases: bool = False
    """Whether a recorder follows steps and phases."""

    @contextmanager
    def waits(self) -> Iterator[None]:
        """What is waited for inside was launched before, outside of the phases in which that is usual."""
        before = self.phase, self.since_ns
        self.phase, self.since_ns = Phase.FINALISE, host_now_ns()
        try:
            yield
        finally:
            self.phase, self.since_ns = before

    @contextmanager
    def has_joined(self) -> Iterator[None]:
        """What is launched inside stands in for what a rank without inputs has not."""
        before, self.flags = self.flags, UNEVEN_INPUTS | SHADOW
        try:
            yield
        finally:
            self.flags = before
