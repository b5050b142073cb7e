"""Step-time breakdown at the head of every page: steps as bars of blocks, and a table of the time per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from overlapscope.account.mean_step import MeanStep
from overlapscope.account.wording import BLOCK_LABELS, REASON_LABELS, apart_text, left_out_text
from overlapscope.analysis.summary import Summary
from overlapscope.interval import Interval
from overlapscope.units import format_interval_ns, format_ns, format_share

_NO_BLOCK: Final = ""


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The step and rank in which a block takes longest."""

    link: str
    """Link to that step on the timeline."""
    where: str
    """Duration, step and rank in words."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block in a bar."""

    block: str
    """Name of the block, one of ``BLOCKS``."""
    label: str
    percent: float
    """Width as a percentage of the longest bar."""
    hint: str
    link: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A step as a bar of blocks."""

    title: str
    step: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class AccountRow:
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


def account_variables(summary: Summary, *others: tuple[str, MeanStep]) -> dict[str, Any]:
    """Return the template variables of ``account.html`` and ``account.css``: the bars to draw.

    Args:
        summary: summary of the recording, whose mean step is the first bar.
        others: title and step of each further bar, to compare with the mean.
    """
    steps = [("Mean of all ranks", summary.mean), *others] if summary.steps else []
    longest_ns = max((mean.step.value for _, mean in steps), default=0.0)
    places = longest_places(summary)
    return {"bars": [bar_of(title, mean, longest_ns, places) for title, mean in steps if longest_ns]}


def table_variables(summary: Summary) -> dict[str, Any]:
    """Return the template variables of ``account_table.html``."""
    return {
        "account": account_rows(summary),
        "account_step": format_ns(summary.mean.step.value),
        "account_interval": format_interval_ns(summary.mean.step),
        "has_job": summary.job is not None,
    }


def counted_text(summary: Summary) -> str:
    """Return sentences that name the steps and ranks over which means are taken."""
    if not summary.steps:
        return "No step has been finished by all ranks, so there is no mean of them."
    ranks = f"{summary.ranks:,} rank{'s' * (summary.ranks != 1)}"
    steps = f"{summary.steps:,} step{'s' * (summary.steps != 1)}"
    apart = f" Kept apart: {apart_text(summary.alike.apart)}." if summary.alike.apart else ""
    return f"Means of {steps} of {ranks}; they add up.{apart} {left_out_text(summary.alike.ranks_left_out)}".rstrip()


def bar_of(title: str, mean: MeanStep, longest_ns: float, places: Mapping[str, Longest]) -> Bar:
    """Build the bar of a step; blocks that a saving has reduced to nothing are left out."""
    return Bar(
        title=title,
        step=format_ns(mean.step.value),
        pieces=tuple(
            Piece(
                block=name,
                label=BLOCK_LABELS[name],
                percent=100 * each.value / longest_ns,
                hint=f"{BLOCK_LABELS[name]}: {format_ns(each.value)}"
                + (f"; longest: {places[name].where}" if name in places else ""),
                link=places[name].link if name in places else "",
            )
            for name, each in mean.blocks.items()
            if each.value > 0
        ),
    )


def longest_places(summary: Summary) -> dict[str, Longest]:
    """Return, by block, the step and rank in which it takes longest, of the steps that means are taken over."""
    return {
        name: Longest(
            link=f"timeline?step={step}&rank={rank}", where=f"{format_ns(longest_ns)} in step {step} of rank {rank}"
        )
        for name, (step, rank, longest_ns) in summary.longest.items()
    }


def account_rows(summary: Summary) -> list[AccountRow]:
    """Return the blocks that take any time in the order of a step, with the parts of exposed communication."""
    rows: list[AccountRow] = []
    if not summary.steps:
        return rows
    places = longest_places(summary)
    for name, mean in summary.mean.blocks.items():
        on_path = summary.job.blocks[name] if summary.job is not None else None
        if not mean.value and not (on_path and on_path.value):
            continue
        rows.append(_row(summary, BLOCK_LABELS[name], name, mean, on_path, places.get(name)))
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
    longest: Longest | None = None,
) -> AccountRow:
    return AccountRow(
        label=label,
        block=block,
        mean=format_ns(mean.value),
        interval=format_interval_ns(mean),
        share=format_share(summary.share_of(mean)),
        job="" if on_path is None else format_ns(on_path.value),
        link=longest.link if longest is not None else "",
        where=longest.where if longest is not None else "",
    )
