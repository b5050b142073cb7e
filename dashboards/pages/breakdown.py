"""Step-time breakdown at the head of every page: steps as bars of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapscope.breakdown.means import MeanStep
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.text import format_ns


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
    time: str
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
                time=format_ns(each.value),
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
