"""Summary of a recording: the mean step-time breakdown of its steady steps, and what the step time is lost to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS, COMPUTE_BLOCKS, Breakdown, tabulate_breakdown
from overlapscope.breakdown.critical_path import JobBreakdown, compute_job_breakdown
from overlapscope.breakdown.drift import Drift, find_drift
from overlapscope.breakdown.means import MeanStep, compute_mean_step, mean_with_ci
from overlapscope.breakdown.own_communication import find_own_communication
from overlapscope.breakdown.spans import Int64Array
from overlapscope.breakdown.steady_steps import (
    SteadySteps,
    exclude_steps_without_end,
    select_steady_steps,
)
from overlapscope.breakdown.waits import REASONS
from overlapscope.interval import Interval
from overlapscope.trace.communication import ImportedCommunication, OwnCommunication, read_imported_communication
from overlapscope.trace.recording import Trace

LITTLE_EXPOSED_SHARE: Final = 0.02
"""Share of the step below which hiding all communication would gain less than steps vary anyway."""

LONG_BEFORE_FORWARD_SHARE: Final = 0.2
"""Share of the step from which the data loader, or other code of the loop, is worth fixing before communication."""

MOSTLY_EXPOSED_RATIO: Final = 0.25
"""Overlap ratio below which communication counts as exposed for one reason."""

LARGE_SHARE: Final = 0.2
"""Share of the step from which a block that is neither compute of the model nor communication of gradients is said."""

Limit = Literal[
    "no step",
    "no step ended",
    "not recorded",
    "no common step",
    "no communication",
    "data wait",
    "host loop",
    "nothing",
    "communication",
    "exposed",
]
"""What takes most of the step that could be saved. ``no step ended``: and none will. ``not recorded``: there are only
logs of collectives. ``communication``: it takes longer than compute, so not all of it
can be hidden. ``exposed``: more of it could be."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Summary:
    """Means over the steady steps of all ranks.

    All means are NaN without such a step. Times are nanoseconds.
    """

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
    imported: ImportedCommunication | None = None
    """All communication of imported profiles, also of other collectives than buckets; None of other recordings."""
    own: OwnCommunication | None = None
    """The script's own collectives by process group; None of imports, and where they matter little."""
    has_steps: bool = True
    """False if only the order of collectives was recorded."""
    is_over: bool = False
    """True if nothing more will be recorded."""
    has_others: bool = False
    """True if there are collectives beside those of buckets and buffers."""
    has_one_bucket: bool = False
    """True if all gradients of a step are in one bucket."""

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

    @property
    def others_exposed_ns(self) -> float:
        """Return the time of an imported step in which there was only other communication than that of gradients."""
        if self.imported is None:
            return 0.0
        return sum(one.exposed_ns or 0.0 for one in self.imported.others) / max(1, self.imported.steps)

    @property
    def _why_no_step(self) -> Limit:
        if not self.has_steps:
            return "not recorded"
        return "no step ended" if self.is_over else "no step"

    @property
    def waits_for_stragglers(self) -> bool:
        """Return True if most of the exposed communication is a wait for a later rank."""
        return self.exposed_for["straggler"].value > self.mean.blocks["exposed"].value / 2

    @property
    def is_held_back_by_one_bucket(self) -> bool:
        """Return True if hardly any communication is hidden, as none can begin before backward has computed all."""
        return self.has_one_bucket and self.overlap_ratio < MOSTLY_EXPOSED_RATIO and not self.waits_for_stragglers

    @property
    def largest_other(self) -> str | None:
        """Return the largest block that is neither before the forward, nor the model, nor what it waits for.

        None if it takes less than ``LARGE_SHARE`` of the step.
        """
        said = {"data_wait", "host_loop", "forward", "backward", "exposed", "unattributed"}
        shares = {name: self.share_of(each) for name, each in self.mean.blocks.items() if name not in said}
        largest = max(shares, key=shares.__getitem__)
        return largest if shares[largest] >= LARGE_SHARE else None

    @property
    def limit(self) -> Limit:
        """Return what the step time is lost to."""
        if not self.steps:
            return "no common step" if len(self.figures) else self._why_no_step
        if math.isnan(self.overlap_ratio):
            return "no communication"
        exposed = self.mean.blocks["exposed"]
        before, limit = max(
            (self.mean.blocks["data_wait"], "data wait"),
            (self.mean.blocks["host_loop"], "host loop"),
            key=lambda each: each[0].value,
        )
        if self.share_of(before) >= LONG_BEFORE_FORWARD_SHARE and before.value > exposed.value:
            return "data wait" if limit == "data wait" else "host loop"
        if self.share_of(exposed) < LITTLE_EXPOSED_SHARE:
            return "nothing"
        is_long = self.communication_ns > self.compute_ns and not self.waits_for_stragglers
        return "communication" if is_long else "exposed"

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

    @cached_property
    def drift(self) -> Drift | None:
        """Return how the step time of counted steps, averaged over ranks, rises or falls; None if it does not."""
        step_time_ns = self.figures[self.is_steady].groupby("step")["step_time_ns"].mean()
        return find_drift(step_time_ns.index.to_numpy(np.int64), step_time_ns.to_numpy(np.float64))

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


def summarize(trace: Trace, breakdown: Breakdown, without_end: Sequence[int] = ()) -> Summary:
    """Summarize a recording.

    Args:
        breakdown: Breakdown of the recording or of some of its steps.
        without_end: Steps that were begun and that no rank finished.
    """
    steady = exclude_steps_without_end(select_steady_steps(trace, breakdown), without_end)
    summary = summarize_table(tabulate_breakdown(breakdown), steady, compute_job_breakdown(trace, breakdown, steady))
    return add_other_communication(summary, trace)


def add_other_communication(summary: Summary, trace: Trace) -> Summary:
    """Add what is known of collectives beside those of gradients."""
    imported = read_imported_communication(trace.run)
    if imported is not None:
        return replace(summary, imported=imported, has_others=len(imported.others) > 0)
    summary = replace(summary, has_steps=not trace.has_only_collectives, is_over=bool(trace.ranks["closed"].all()))
    buckets = trace.collectives["bucket"] >= 0
    gathers_parameters = (buckets & (trace.collectives["op"] == "all_gather")).any()
    own = None
    if summary.steps or trace.has_only_collectives:  # else no step has finished yet
        own = find_own_communication(trace, summary.steady.steps)
    has_other_groups = own is not None and own.has_other_groups
    reduced = trace.collectives[buckets & trace.collectives["step"].isin(summary.steady.steps)]
    is_little = summary.steps > 0 and summary.share_of(summary.mean.blocks["collectives"]) < LITTLE_EXPOSED_SHARE
    return replace(
        summary,
        has_others=(has_other_groups or len(trace.user_collectives) > 0) and not gathers_parameters,
        has_one_bucket=len(reduced[["model", "bucket", "op"]].drop_duplicates()) == 1
        and "all_reduce" in set(reduced["op"]),
        own=None if is_little and not has_other_groups else own,
    )


def summarize_only(summary: Summary, steps: Int64Array) -> Summary:
    """Summarize those of the steady steps of a recording that are among some steps."""
    steady = summary.steady
    among = replace(steady, is_steady=steady.is_steady & np.isin(steady.finished, steps))
    return summarize_table(summary.figures, among, summary.job_breakdown)


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
    return Summary(
        steady=steady,
        mean=compute_mean_step(steady.mean_over_ranks(blocks_ns)),
        exposed_for=dict(zip(REASONS, mean_with_ci(steady.mean_over_ranks(for_reason_ns)), strict=True)),
        hidden=hidden,
        job=None if job is None else compute_mean_step(job.ns[steady.is_steady].astype(np.float64)),
        job_breakdown=job,
        figures=figures,
        is_steady=is_steady,
    )
