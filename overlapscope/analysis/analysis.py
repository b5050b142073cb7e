"""Everything that is computed from a recording, for commands and pages alike: each thing once, when first asked for."""

from __future__ import annotations

from functools import cached_property

from overlapscope.account.alike import first_step_after_warm_up
from overlapscope.account.blocks import Account, account_of
from overlapscope.analysis.cycles import Cycles, cycles_of
from overlapscope.analysis.replay import Replay
from overlapscope.analysis.stragglers import Stragglers, stragglers_in
from overlapscope.analysis.summary import Summary, summarise
from overlapscope.trace.reader import Trace


class Analysis:
    """What a recording says about the steps of a job."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def account(self) -> Account:
        """What every rank's every step consists of."""
        return account_of(self.trace)

    @cached_property
    def summary(self) -> Summary:
        """What that comes to."""
        return summarise(self.trace, self.account)

    @cached_property
    def cycles(self) -> Cycles | None:
        """The cycles after the warm-up; None if ranks can't be compared, and ``sentences.why_none`` says why."""
        return cycles_of(self.trace, self.account, first_step_after_warm_up(self.trace.steps))

    @cached_property
    def replay(self) -> Replay | None:
        """The replay of the cycles."""
        return None if self.cycles is None else Replay(self.cycles)

    @cached_property
    def stragglers(self) -> Stragglers | None:
        """Who makes the others wait; None without cycles."""
        return None if self.cycles is None else stragglers_in(self.trace, self.cycles, self.summary)
