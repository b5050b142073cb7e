"""Current position of this rank in its training: step, phase and batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.collective_log import SHADOW, UNEVEN_INPUTS, UNKNOWN, UNKNOWN_PHASE
from overlapscope.trace.schema import NO_CALL_SITE, Phase


@dataclass(slots=True, kw_only=True)
class TrainingPosition:
    """Position of this rank in its training.

    Written by the recorder (or, without DDP, by the counter of optimizer steps); the collective log stores it in every
    entry, and the watchdog sends it to the other ranks.
    """

    step: int = 0
    """Optimizer step that the host is in."""
    phase: int = UNKNOWN_PHASE
    """A ``Phase``, or ``UNKNOWN_PHASE``."""
    since_ns: int = 0
    """Time at which the phase began, on the host clock; 0 if phases are not tracked."""
    batch: int = UNKNOWN
    """Position of this rank in its data, as of its latest training forward."""
    flags: int = 0
    """Flags of all entries from now on, see ``overlapscope.trace.collective_log``."""
    backward_call_site: int = NO_CALL_SITE
    """Call site of collectives that DDP launches during a backward."""
    no_sync_since: int | None = None
    """First step since which all backwards were under ``no_sync()``; None if the latest step to end was reduced."""
    has_updated: bool = False
    """True if ``step`` follows an update, and no training forward has begun it."""
    has_partly_updated: bool = False
    """True after an update in ``step`` by one of several optimizers, if no training forward has begun since."""
    has_phases: bool = False
    """True if a recorder tracks steps and phases."""

    @contextmanager
    def waiting_for_parameters(self) -> Iterator[None]:
        """Mark a wait for earlier launches that happens outside of the phases in which this is usual."""
        before = self.phase, self.since_ns
        self.phase, self.since_ns = Phase.FINALIZE, host_now_ns()
        try:
            yield
        finally:
            self.phase, self.since_ns = before

    @contextmanager
    def has_joined(self) -> Iterator[None]:
        """Mark collectives launched inside as shadows of those that a joined rank, which has no more inputs, skips."""
        before, self.flags = self.flags, UNEVEN_INPUTS | SHADOW
        try:
            yield
        finally:
            self.flags = before
