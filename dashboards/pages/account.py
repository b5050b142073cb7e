"""The account at the head of a page: a step as a bar of blocks, and what each of them comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.wording import BLOCK_LABELS, REASON_LABELS
from overlapscope.analysis.summary import Summary
from overlapscope.interval import Interval
from overlapscope.units import format_interval_ns, format_ns, format_share

_NO_BLOCK: Final = ""


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """A block, or a part of one, in the table and in the bars."""

    label: str
    block: str
    """Of ``BLOCKS``; empty for a part of the one above it, which has no place in the bars."""
    mean: str
    interval: str
    share: str
    percent: float
    """Of the step."""
    job: str
    """On the critical path."""
    job_percent: float
    link: str
    """To the step in which it takes longest."""
    where: str
    """That step and rank in words."""


def account_variables(summary: Summary, *, is_full: bool = False) -> dict[str, Any]:
    """What ``account.html`` and ``account.css`` need.

    Args:
        is_full: with the table of all blocks, and not the bars alone.
    """
    return {
        "account": account_rows(summary),
        "account_step": format_ns(summary.mean.step.value),
        "account_interval": format_interval_ns(summary.mean.step),
        "has_job": summary.job is not None,
        "is_account_full": is_full,
        "blocks": BLOCKS,
    }


def account_rows(summary: Summary) -> list[AccountRow]:
    """The blocks that take any time, in the order of a step, exposed communication with its parts."""
    rows: list[AccountRow] = []
    if not summary.steps:
        return rows
    for name, mean in summary.mean.blocks.items():
        on_path = summary.job.blocks[name] if summary.job is not None else None
        if not mean.value and not (on_path and on_path.value):
            continue
        rows.append(_row(summary, BLOCK_LABELS[name], name, mean, on_path))
        if name == "exposed":
            parts = {reason: part for reason, part in summary.exposed_for.items() if part.value}
            rows += [_row(summary, REASON_LABELS[reason], _NO_BLOCK, part, None) for reason, part in parts.items()]
    return rows


def _row(summary: Summary, label: str, block: str, mean: Interval, on_path: Interval | None) -> AccountRow:
    step_ns = summary.mean.step.value
    link = where = ""
    if block and mean.value:
        counted = summary.figures[summary.is_alike]
        longest = counted.iloc[int(counted[f"{block}_ns"].to_numpy().argmax())]
        step, rank = int(longest["step"]), int(longest["rank"])
        link = f"timeline?step={step}&rank={rank}"
        where = f"{format_ns(longest[f'{block}_ns'])} in step {step} of rank {rank}"
    return AccountRow(
        label=label,
        block=block,
        mean=format_ns(mean.value),
        interval=format_interval_ns(mean),
        share=format_share(mean.value / step_ns),
        percent=100 * mean.value / step_ns,
        job="" if on_path is None else format_ns(on_path.value),
        job_percent=0.0 if on_path is None else 100 * on_path.value / step_ns,
        link=link,
        where=where,
    )
