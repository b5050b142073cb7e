"""The differences of blocks one after the other, from the step of the base to that of the new side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.wording import BLOCK_LABELS
from overlapscope.analysis.compare.changes import Difference
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.sentences import signed_ns

_TICKS: Final = 6
"""About so many on the axis."""


@dataclass(frozen=True, kw_only=True)
class Fall:
    """A row of the waterfall. Places are percentages of its width."""

    label: str
    block: str
    """Of ``BLOCKS``; empty for the step, which begins at 0 again."""
    left: float
    width: float
    low: float
    """Where the interval of its end begins, and ends."""
    high: float
    difference: str
    interval: str
    is_sure: bool
    """Whether it differs beyond noise."""


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """The differences of all blocks one after the other, which lead to that of the step."""

    falls: tuple[Fall, ...]
    ticks: tuple[tuple[float, str], ...]
    """Where on the axis, and what is written there."""


def waterfall_of(found: Comparison) -> Waterfall:
    """Place the differences of the blocks that any side has."""
    present = [name for name in BLOCKS if found.changes[name].mean.base or found.changes[name].mean.new]
    rows: list[tuple[str, float, Difference]] = []
    now_ns = 0.0
    for name in present:
        rows.append((name, now_ns, found.changes[name].mean))
        now_ns += found.changes[name].mean.ns.value
    rows.append(("", 0.0, found.step.mean))
    edges_ns = [from_ns + edge for _, from_ns, each in rows for edge in (0.0, each.ns.low, each.ns.high)]
    first_ns, last_ns = min(edges_ns), max(edges_ns)
    first_ns, last_ns = (first_ns, last_ns) if last_ns > first_ns else (first_ns - 1, last_ns + 1)

    def place(ns: float) -> float:
        return 100 * (ns - first_ns) / (last_ns - first_ns)

    return Waterfall(
        falls=tuple(
            Fall(
                label=BLOCK_LABELS.get(name, "step"),
                block=name,
                left=place(min(from_ns, from_ns + each.ns.value)),
                width=place(first_ns + abs(each.ns.value)),
                low=place(from_ns + each.ns.low),
                high=place(from_ns + each.ns.high),
                difference=signed_ns(each.ns.value),
                interval=f"{signed_ns(each.ns.low)} to {signed_ns(each.ns.high)}",
                is_sure=each.is_sure,
            )
            for name, from_ns, each in rows
        ),
        ticks=tuple((place(ns), "0" if ns == 0 else signed_ns(ns)) for ns in _ticks(first_ns, last_ns)),
    )


def _ticks(first_ns: float, last_ns: float) -> list[float]:
    """Round numbers between two others."""
    least = (last_ns - first_ns) / _TICKS
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least)
    return [number * step for number in range(math.ceil(first_ns / step), math.floor(last_ns / step) + 1)]
