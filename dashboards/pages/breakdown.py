"""Step-time breakdown at the head of every page: steps as bars of blocks, and a table of the time per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from overlapscope.breakdown.means import MeanStep
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.text import BLOCK_LABELS, REASON_LABELS, describe_excluded, describe_uncounted_ranks
from overlapscope.interval import Interval
from overlapscope.text import count_of, format_interval_ns, format_ns, format_share

# Headline figures: the big numbers at the top of a page.


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One big number at the top of a page."""

    label: str
    value: str
    note: str
    color: str
    """Role in ``dashboards.theme`` that gives the color."""


_NO_BLOCK: Final = ""


@dataclass(frozen=True, kw_only=True)
class LongestOccurrence:
    """The step and rank in which a block takes longest."""

    link: str
    """Link to that step on the timeline."""
    where: str
    """Duration, step and rank in words."""


@dataclass(frozen=True, kw_only=True)
class BarSegment:
    """A block in a bar."""

    block: str
    """Name of the block, one of ``BLOCKS``."""
    label: str
    percent: float
    """Width as a percentage of the longest bar."""
    hint: str
    link: str


@dataclass(frozen=True, kw_only=True)
class StepBar:
    """A step as a bar of blocks."""

    title: str
    step: str
    pieces: tuple[BarSegment, ...]


@dataclass(frozen=True, kw_only=True)
class BreakdownRow:
    """A row of the table: a block, or a part of one."""

    label: str
    block: str
    """Name of the block, one of ``BLOCKS``; empty for a part of the block above it."""
    mean: str
    interval: str
    share: str
    job: str
    """Time on the critical path."""
    link: str
    where: str


def build_breakdown_context(summary: Summary, *others: tuple[str, MeanStep]) -> dict[str, Any]:
    """Return the template variables of ``breakdown.html`` and ``breakdown.css``: the bars to draw.

    Args:
        summary: summary of the recording, whose mean step is the first bar.
        others: title and step of each further bar, to compare with the mean.
    """
    steps = [("Mean of all ranks", summary.mean), *others] if summary.steps else []
    longest_ns = max((mean.step.value for _, mean in steps), default=0.0)
    occurrences = find_longest_occurrences(summary)
    return {"bars": [build_step_bar(title, mean, longest_ns, occurrences) for title, mean in steps if longest_ns]}


def build_breakdown_table_context(summary: Summary) -> dict[str, Any]:
    """Return the template variables of ``breakdown_table.html``."""
    return {
        "breakdown": build_breakdown_rows(summary),
        "breakdown_step": format_ns(summary.mean.step.value),
        "breakdown_interval": format_interval_ns(summary.mean.step),
        "has_job": summary.job is not None,
    }


def describe_sample(summary: Summary) -> str:
    """Return sentences that name the steps and ranks over which means are taken."""
    if not summary.steps:
        return "No step has been finished by all ranks, so there are no means."
    ranks, steps = count_of(summary.ranks, "rank"), count_of(summary.steps, "step")
    excluded = f" Excluded: {describe_excluded(summary.steady.excluded)}." if summary.steady.excluded else ""
    uncounted = describe_uncounted_ranks(summary.steady.excluded_ranks)
    return f"Means of {steps} of {ranks}; they sum to the step time.{excluded} {uncounted}".rstrip()


def build_step_bar(
    title: str, mean: MeanStep, longest_ns: float, occurrences: Mapping[str, LongestOccurrence]
) -> StepBar:
    """Build the bar of a step; blocks that a saving has reduced to nothing are left out."""
    return StepBar(
        title=title,
        step=format_ns(mean.step.value),
        pieces=tuple(
            BarSegment(
                block=name,
                label=BLOCK_LABELS[name],
                percent=100 * each.value / longest_ns,
                hint=f"{BLOCK_LABELS[name]}: {format_ns(each.value)}"
                + (f"; longest: {occurrences[name].where}" if name in occurrences else ""),
                link=occurrences[name].link if name in occurrences else "",
            )
            for name, each in mean.blocks.items()
            if each.value > 0
        ),
    )


def find_longest_occurrences(summary: Summary) -> dict[str, LongestOccurrence]:
    """Return, by block, the step and rank in which it takes longest, of the steps that means are taken over."""
    return {
        name: LongestOccurrence(
            link=f"timeline?step={step}&rank={rank}", where=f"{format_ns(longest_ns)} in step {step} of rank {rank}"
        )
        for name, (step, rank, longest_ns) in summary.longest.items()
    }


def build_breakdown_rows(summary: Summary) -> list[BreakdownRow]:
    """Return the blocks that take any time in the order of a step, with the parts of exposed communication."""
    rows: list[BreakdownRow] = []
    if not summary.steps:
        return rows
    occurrences = find_longest_occurrences(summary)
    for name, mean in summary.mean.blocks.items():
        on_path = summary.job.blocks[name] if summary.job is not None else None
        if not mean.value and not (on_path and on_path.value):
            continue
        rows.append(_row(summary, BLOCK_LABELS[name], name, mean, on_path, occurrences.get(name)))
        if name == "exposed":
            parts = {reason: part for reason, part in summary.exposed_for.items() if part.value}
            rows += [_row(summary, REASON_LABELS[reason], _NO_BLOCK, part) for reason, part in parts.items()]
    return rows


def _row(
    summary: Summary,
    label: str,
    block: str,
    mean: Interval,
    on_path: Interval | None = None,
    longest: LongestOccurrence | None = None,
) -> BreakdownRow:
    return BreakdownRow(
        label=label,
        block=block,
        mean=format_ns(mean.value),
        interval=format_interval_ns(mean),
        share=format_share(summary.share_of(mean)),
        job="" if on_path is None else format_ns(on_path.value),
        link=longest.link if longest is not None else "",
        where=longest.where if longest is not None else "",
    )
