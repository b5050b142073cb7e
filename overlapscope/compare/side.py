"""One side of a comparison: a choice of steps of a recording, and the breakdown of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import BLOCKS, COMPUTE_BLOCKS, Breakdown, compute_breakdown
from overlapscope.breakdown.means import SEGMENTS
from overlapscope.breakdown.spans import Float64Array, Int64Array
from overlapscope.breakdown.summary import Summary, summarize
from overlapscope.breakdown.text import describe_excluded
from overlapscope.breakdown.waits import REASONS
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of
from overlapscope.trace.recording import Trace

STEP: Final = "step"
EXPOSED_PARTS: Final = tuple(f"exposed_{reason}" for reason in REASONS)
PARTS: Final = (STEP, *BLOCKS, *EXPOSED_PARTS, "compute", "communication", "hidden")
"""Parts of a step that can be compared: the step, its blocks, which sum to it, exposed communication by reason, and
sums of blocks."""


@dataclass(frozen=True, kw_only=True)
class StepChoice:
    """Selection of steps of a recording; by default all of them."""

    first: int | None = None
    """First selected step."""
    end: int | None = None
    """First step that is not selected any more."""
    plan: int | None = None
    """Epoch of the bucket plan that selected steps are reduced with."""

    def __str__(self) -> str:
        """Describe the selection in words; empty for all steps."""
        last = None if self.end is None else self.end - 1
        from_to = f"steps {self.first or 0} to {last}" if last is not None else f"steps from {self.first}"
        steps = [from_to] if self.first is not None or last is not None else []
        return " ".join(steps + ([f"with bucket plan {self.plan}"] if self.plan is not None else []))


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparisonSide:
    """The steps of one side."""

    recording: str
    """Display name of the recording."""
    trace: Trace
    choice: StepChoice
    breakdown: Breakdown
    """Breakdown of the chosen steps."""
    summary: Summary
    """Summary of the chosen steps."""

    @classmethod
    def of(cls, analysis: Analysis, choice: StepChoice, recording: str = "") -> ComparisonSide:
        """Choose steps of a recording.

        Args:
            recording: Display name; by default the path.

        Raises:
            OverlapScopeError: There are not enough steps to compare.
        """
        trace, breakdown, summary = analysis.trace, None, None
        if choice != StepChoice():
            breakdown = compute_breakdown(
                replace(trace, steps=trace.steps[_is_chosen(trace, choice)].reset_index(drop=True))
            )
            summary = summarize(trace, breakdown)
        side = cls(
            recording=recording or str(trace.path),
            trace=trace,
            choice=choice,
            breakdown=breakdown or analysis.breakdown,
            summary=summary or analysis.summary,
        )
        side._check()
        return side

    @property
    def name(self) -> str:
        """Return the name of the recording and the choice of steps."""
        return f"{self.recording}{f' {self.choice}' if str(self.choice) else ''}"

    @property
    def steps(self) -> Int64Array:
        """Return the numbers of the compared steps, which are the steady ones (S,)."""
        return self.summary.steady.steps

    def parts_ns(self) -> dict[str, Float64Array]:
        """Return the time of each of ``PARTS`` in each step (S,), as the mean of all ranks."""
        steady, figures = self.summary.steady, self.summary.figures
        blocks_ns = steady.mean_over_ranks(self.breakdown.ns)
        reasons_ns = steady.mean_over_ranks(figures[[f"{name}_ns" for name in EXPOSED_PARTS]].to_numpy())
        found = {STEP: blocks_ns.sum(axis=1)} | dict(zip(BLOCKS, blocks_ns.T, strict=True))
        found |= dict(zip(EXPOSED_PARTS, reasons_ns.T, strict=True))
        found["compute"] = np.sum([found[name] for name in COMPUTE_BLOCKS], axis=0)
        hidden_ns = steady.mean_over_ranks(self.breakdown.hidden_ns.sum(axis=1))
        return found | {"communication": hidden_ns + found["exposed"], "hidden": hidden_ns}

    def job_ns(self) -> dict[str, Float64Array] | None:
        """Return the time that the job waits for each block (S,); None if times of some ranks can't be compared."""
        job = self.summary.job_breakdown
        if job is None:
            return None
        return dict(zip(BLOCKS, job.ns[self.summary.steady.is_steady].T.astype(np.float64), strict=True))

    def _check(self) -> None:
        if len(self.steps) >= SEGMENTS:
            return
        excluded = describe_excluded(self.summary.steady.excluded)
        counted = count_of(len(self.steps), "step")
        known = ""
        if self.choice.plan is not None:
            known = f"; its bucket plans are {', '.join(map(str, sorted(self.trace.plans['plan_epoch'].unique())))}"
        raise OverlapScopeError(
            f"{self.name}: {counted} to compare{f' ({excluded} excluded)' if excluded else ''}; "
            f"a comparison takes {SEGMENTS} or more on each side{known}"
        )


def _is_chosen(trace: Trace, choice: StepChoice) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows of ``trace.steps`` are chosen."""
    step = trace.steps["step"].to_numpy(np.int64)
    chosen = np.ones(len(step), dtype=bool)
    if choice.first is not None:
        chosen &= step >= choice.first
    if choice.end is not None:
        chosen &= step < choice.end
    if choice.plan is not None:
        plan = _plan_of_step(trace)
        chosen &= np.isin(step, plan.index[plan == choice.plan])
    return chosen


def plans_to_compare(trace: Trace) -> tuple[int, ...]:
    """Return the epochs of the bucket plans that are active long enough for one side of a comparison, ascending."""
    steps = _plan_of_step(trace).value_counts()
    return tuple(sorted(map(int, steps.index[steps >= SEGMENTS])))


def _plan_of_step(trace: Trace) -> pd.Series[int]:
    """Return the epoch of the bucket plan by step, without steps in which it changes."""
    reduced = trace.collectives[trace.collectives["bucket"] >= 0]
    epochs = reduced.groupby("step")["plan_epoch"].agg(["min", "max"])
    return epochs.loc[epochs["min"] == epochs["max"], "min"]
