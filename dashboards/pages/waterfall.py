"""Waterfall chart of a comparison: the differences of the blocks, from the step of the base to that of the new side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.wording import BLOCK_LABELS
from overlapscope.analysis.compare.changes import TimeDifference
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.sentences import signed_ns

_DESIRED_TICKS: Final = 6
"""Approximate number of ticks on the axis."""


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """A row of the waterfall; positions are percentages of its width."""

    label: str
    block: str
    """Name of the block, one of ``BLOCKS``; empty for the step, whose row begins at 0 again."""
    left: float
    width: float
    low: float
    """Start of the confidence interval around the end of the row; ``high`` is its end."""
    high: float
    difference: str
    interval: str
    is_significant: bool
    """True if the difference is significant."""


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """The differences of all blocks, each row beginning where the one above ends, and that of the step."""

    falls: tuple[WaterfallBar, ...]
    ticks: tuple[tuple[float, str], ...]
    """Position on the axis and label of each tick."""


def build_waterfall(found: Comparison) -> Waterfall:
    """Lay out the differences of the blocks that occur on any side.

    Blocks that changed by +2 ms and -3 ms give rows from 0 to +2 ms and from +2 ms to -1 ms, and a row from 0 to
    -1 ms for the step.
    """
    present = [name for name in BLOCKS if found.changes[name].mean.base or found.changes[name].mean.new]
    rows: list[tuple[str, float, TimeDifference]] = []
    now_ns = 0.0
    for name in present:
        rows.append((name, now_ns, found.changes[name].mean))
        now_ns += found.changes[name].mean.ns.value
    rows.append(("", 0.0, found.step.mean))
    edges_ns = [from_ns + edge for _, from_ns, each in rows for edge in (0.0, each.ns.low, each.ns.high)]
    first_ns, last_ns = min(edges_ns), max(edges_ns)
    first_ns, last_ns = (first_ns, last_ns) if last_ns > first_ns else (first_ns - 1, last_ns + 1)

    def to_percent(ns: float) -> float:
        return 100 * (ns - first_ns) / (last_ns - first_ns)

    return Waterfall(
        falls=tuple(
            WaterfallBar(
                label=BLOCK_LABELS.get(name, "step"),
                block=name,
                left=to_percent(min(from_ns, from_ns + each.ns.value)),
                width=to_percent(first_ns + abs(each.ns.value)),
                low=to_percent(from_ns + each.ns.low),
                high=to_percent(from_ns + each.ns.high),
                difference=signed_ns(each.ns.value),
                interval=f"{signed_ns(each.ns.low)} to {signed_ns(each.ns.high)}",
                is_significant=each.is_significant,
            )
            for name, from_ns, each in rows
        ),
        ticks=tuple((to_percent(ns), "0" if ns == 0 else signed_ns(ns)) for ns in _compute_ticks(first_ns, last_ns)),
    )


def _compute_ticks(first_ns: float, last_ns: float) -> list[float]:
    """Return about ``_DESIRED_TICKS`` round numbers in a range: from -0.7 to 5.2 these are 0, 1, 2, 3, 4 and 5."""
    least = (last_ns - first_ns) / _DESIRED_TICKS
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least)
    return [number * step for number in range(math.ceil(first_ns / step), math.floor(last_ns / step) + 1)]
