"""Lazy results of the analysis of a recording, shared by commands and pages: each is computed once, on first access."""

from __future__ import annotations

from functools import cached_property

from overlapscope.breakdown.breakdown import Breakdown, compute_breakdown
from overlapscope.breakdown.steady_steps import find_first_step_after_warm_up, find_steps_without_end
from overlapscope.breakdown.summary import Summary, summarize
from overlapscope.machine.of_steps import MachineSummary
from overlapscope.stragglers.cycles import Cycles, build_cycles
from overlapscope.stragglers.replay import Replay
from overlapscope.stragglers.stragglers import Stragglers, find_stragglers
from overlapscope.trace.recording import Trace


class Analysis:
    """The results of the analysis of a recording."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def breakdown(self) -> Breakdown:
        """Compute the breakdown of every step of every rank."""
        return compute_breakdown(self.trace)

    @cached_property
    def summary(self) -> Summary:
        """Summarize that breakdown."""
        return summarize(self.trace, self.breakdown, find_steps_without_end(self.trace))

    @cached_property
    def machine(self) -> MachineSummary:
        """Summarize what the machine said."""
        return MachineSummary(self.trace)

    @cached_property
    def cycles(self) -> Cycles | None:
        """Arrange the steps after the warm-up in cycles.

        None if ranks can't be compared; ``stragglers.text.explain_missing_stragglers`` gives the reason.
        """
        return build_cycles(self.trace, self.breakdown, find_first_step_after_warm_up(self.trace.steps))

    @cached_property
    def replay(self) -> Replay | None:
        """Return the replay of the cycles; None without cycles."""
        return None if self.cycles is None else Replay(self.cycles)

    @cached_property
    def stragglers(self) -> Stragglers | None:
        """Find the ranks that make the others wait; None without cycles."""
        return None if self.cycles is None else find_stragglers(self.trace, self.cycles, self.summary)
