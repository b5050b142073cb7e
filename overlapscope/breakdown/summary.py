"""Summary of a recording: one sentence on where the step time goes, and the step-time breakdown behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS, Breakdown
from overlapscope.breakdown.breakdown_table import COMPUTE_BLOCKS, tabulate_breakdown
from overlapscope.breakdown.critical_path import JobBreakdown, compute_job_breakdown
from overlapscope.breakdown.means import MeanStep, compute_mean_step, mean_with_ci
from overlapscope.breakdown.steady_steps import SteadySteps, select_steady_steps
from overlapscope.breakdown.waits import REASONS
from overlapscope.interval import Interval
from overlapscope.text import format_ns, format_share
from overlapscope.trace.recording import Trace

LITTLE_EXPOSED_SHARE: Final = 0.02
"""Share of the step below which hiding all communication would gain less than steps vary anyway."""

LONG_BEFORE_FORWARD_SHARE: Final = 0.2
"""Share of the step from which the data loader, or other code of the loop, is worth fixing before communication."""

_SPENT_BEFORE_FORWARD: Final = {
    "data_wait": ("waiting for data", "for communication"),
    "host_loop": ("in the loop's own code between an update and the next forward", "waiting for communication"),
}
"""By block, its name in a sentence and the name of exposed communication after it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Summary:
    """The summary sentence, and means over the steady steps of all ranks.

    All means are NaN without such a step. Times are nanoseconds.
    """

    sentence: str
    """The summary in one sentence."""
    steady: SteadySteps
    """The steady steps, over which means are taken."""
    mean: MeanStep
    """The mean step."""
    exposed_for: dict[str, Interval]
    """Exposed communication by reason; the values sum to it."""
    hidden: Interval
    """Communication during which other work runs."""
    job: MeanStep | None
    """Blocks of the same step on the critical path; None if times of some ranks can't be compared."""
    job_breakdown: JobBreakdown | None
    """The same step by step."""
    figures: pd.DataFrame
    """Table of all steps of all ranks, from ``tabulate_breakdown``."""
    is_steady: npt.NDArray[np.bool_]
    """True for rows of ``figures`` that are counted."""

    @property
    def ranks(self) -> int:
        """Return the number of counted ranks."""
        return len(self.steady.ranks) if self.steps else 0

    @property
    def steps(self) -> int:
        """Return the number of counted steps."""
        return int(self.steady.is_steady.sum())

    @property
    def compute_ns(self) -> float:
        """Return the sum of forward, backward, optimizer and evaluation."""
        return sum(self.mean.blocks[name].value for name in COMPUTE_BLOCKS)

    @property
    def communication_ns(self) -> float:
        """Return the sum of hidden and exposed communication."""
        return self.hidden.value + self.mean.blocks["exposed"].value

    @property
    def overlap_ratio(self) -> float:
        """Return hidden over all communication; NaN without communication."""
        return self.hidden.value / self.communication_ns if self.communication_ns else math.nan

    def share_of(self, part: Interval) -> float:
        """Return a part of the mean step as a share of it; NaN without one."""
        return part.value / self.mean.step.value if self.mean.step.value else math.nan

    @cached_property
    def longest(self) -> dict[str, tuple[int, int, int]]:
        """Return the step in which each block takes longest, the rank there, and the time in nanoseconds.

        Blocks without any time are left out.
        """
        counted, found = self.figures[self.is_steady], {}
        for name in self.mean.present if self.steps else ():
            row = counted.iloc[int(counted[f"{name}_ns"].to_numpy().argmax())]
            found[name] = int(row["step"]), int(row["rank"]), int(row[f"{name}_ns"])
        return found

    @cached_property
    def typical_step(self) -> int | None:
        """Return the counted step with the median time, averaged over ranks; None without one."""
        if not self.steps:
            return None
        step_time_ns = self.figures[self.is_steady].groupby("step")["step_time_ns"].mean()
        middle = step_time_ns.sort_values(kind="stable").index[(len(step_time_ns) - 1) // 2]
        return int(middle)

    def step(self, number: int) -> MeanStep | None:
        """Return a single step, as the mean of the ranks that have finished it; None if none has."""
        rows = self.figures.loc[self.figures["step"] == number, [f"{name}_ns" for name in BLOCKS]]
        return compute_mean_step(rows.to_numpy(np.float64).mean(axis=0, keepdims=True)) if len(rows) else None

    @property
    def finished_together(self) -> pd.DataFrame:
        """Return ``figures`` without steps that some rank never finished; all rows if there are no other steps."""
        is_finished = self.figures["step"].isin(self.steady.finished)
        return self.figures[is_finished] if is_finished.any() else self.figures

    def means_by_rank(self) -> pd.DataFrame:
        """Return one row per rank: rank, steps_counted, and the means of ``figures``; the ratio is one of means."""
        counted = self.figures[self.is_steady].drop(columns=["step", "overlap_ratio"])
        by_rank = counted.groupby("rank")
        means = by_rank.mean()
        means["overlap_ratio"] = means["hidden_ns"] / means["communication_ns"].where(means["communication_ns"] > 0)
        means.insert(0, "steps_counted", by_rank.size())
        return means.reset_index()


def summarize(trace: Trace, breakdown: Breakdown) -> Summary:
    """Summarize a recording."""
    steady = select_steady_steps(trace, breakdown)
    return summarize_table(tabulate_breakdown(breakdown), steady, compute_job_breakdown(trace, breakdown, steady))


def summarize_table(figures: pd.DataFrame, steady: SteadySteps, job: JobBreakdown | None) -> Summary:
    """Summarize a table of all steps of all ranks.

    Args:
        figures: From ``tabulate_breakdown``.
        steady: Which of these steps are counted.
        job: The critical path, if it is known.
    """
    blocks_ns, for_reason_ns, hidden_ns = (
        figures[[f"{name}_ns" for name in names]].to_numpy()
        for names in (BLOCKS, [f"exposed_{reason}" for reason in REASONS], ["hidden"])
    )
    (hidden,) = mean_with_ci(steady.mean_over_ranks(hidden_ns))
    is_steady = np.zeros(len(figures), dtype=bool)
    is_steady[steady.rows.ravel()] = True
    found = Summary(
        sentence="",
        steady=steady,
        mean=compute_mean_step(steady.mean_over_ranks(blocks_ns)),
        exposed_for=dict(zip(REASONS, mean_with_ci(steady.mean_over_ranks(for_reason_ns)), strict=True)),
        hidden=hidden,
        job=None if job is None else compute_mean_step(job.ns[steady.is_steady].astype(np.float64)),
        job_breakdown=job,
        figures=figures,
        is_steady=is_steady,
    )
    return replace(found, sentence=_sentence(found))


def _sentence(found: Summary) -> str:
    if not len(found.figures):
        return "No step has finished, so there is nothing to measure yet."
    if not found.steps:
        return "No step has been finished by all ranks, so there is no mean of them."
    exposed, exposed_share = found.mean.blocks["exposed"], found.share_of(found.mean.blocks["exposed"])
    spent = max(_SPENT_BEFORE_FORWARD, key=lambda name: found.mean.blocks[name].value)
    before, before_share = found.mean.blocks[spent], found.share_of(found.mean.blocks[spent])
    step = f"a {format_ns(found.mean.step.value)} step"
    hidden = f"{format_share(found.overlap_ratio)} of communication is hidden"
    waiting = f"{format_ns(exposed.value)} of {step} ({format_share(exposed_share)})"
    straggler_ns = found.exposed_for["straggler"].value
    later = ""
    if straggler_ns > exposed.value / 2:
        later = f", {format_ns(straggler_ns)} of that for the rank that arrives last"
    if math.isnan(found.overlap_ratio):
        steps = f"steps of {format_ns(found.mean.step.value)}"
        return f"No communication of gradients was recorded in {steps}, so there is no overlap to measure."
    if before_share >= LONG_BEFORE_FORWARD_SHARE and before.value > exposed.value:
        how, communicating = _SPENT_BEFORE_FORWARD[spent]
        return (
            f"{format_ns(before.value)} of {step} ({format_share(before_share)}) is spent {how}, "
            f"{format_ns(exposed.value)} ({format_share(exposed_share)}) {communicating}{later}; {hidden}."
        )
    if exposed_share < LITTLE_EXPOSED_SHARE:
        return f"{hidden}; only {waiting} is spent waiting for it, so there is little left to gain."
    if found.communication_ns > found.compute_ns and not later:
        return (
            f"Communication takes {format_ns(found.communication_ns)} and compute {format_ns(found.compute_ns)}, so it "
            f"can't all hide: {hidden}, and {waiting} is spent waiting for it."
        )
    return f"{hidden}; {waiting} is spent waiting for it{later}."
