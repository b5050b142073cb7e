"""What lies within an area of the timeline, as markup: a table with a row per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pandas as pd

from dashboards.pages.shell import render_fragment
from dashboards.plots.timeline_area import Area
from overlapscope.breakdown.area import find_extremes
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.lanes import Timeline
from overlapscope.breakdown.text import BLOCK_LABELS, REASON_LABELS
from overlapscope.breakdown.waits import REASONS
from overlapscope.text import count_of, format_bytes, format_ns, format_ranks, format_timestamp_ns, rank_list

_MIN_SUMMARIZED: Final = 4
"""Minimum number of ranks of which the most, the median and the least are given."""

_GROUPS: Final[dict[str, dict[str, str]]] = {
    "sums to {}": {f"{name}_ns": BLOCK_LABELS[name] for name in BLOCKS},
    "exposed, by what is waited for": {f"exposed_{name}_ns": REASON_LABELS[name] for name in REASONS},
    "": {"hidden_ns": "hidden communication"},
    "what runs in it": {"collectives": "collectives", "bytes": "size", "gradients": "gradients ready"},
}
_ALWAYS: Final = frozenset({"exposed_ns", "hidden_ns", "collectives"})
"""Columns that are shown also if all of them are 0."""
_FORMATS: Final[dict[str, Callable[[int], str]]] = {
    "collectives": "{:,}".format,
    "gradients": "{:,}".format,
    "bytes": format_bytes,
}


def render_area(timeline: Timeline, area: Area, table: pd.DataFrame) -> str:
    """Return what each rank does in an area.

    Args:
        timeline: lanes of the ranks shown.
        area: the area.
        table: its table, from ``tabulate_area``.
    """
    steps = timeline.steps
    touched = steps.loc[(steps["start_ns"] < area.to_ns) & (steps["end_ns"] > area.from_ns), "step"].tolist()
    length = format_ns(area.to_ns - area.from_ns)
    groups = [
        (heading.format(length), [(name, label) for name, label in columns.items() if _is_shown(table, name)])
        for heading, columns in _GROUPS.items()
    ]
    names = [name for _, columns in groups for name, _ in columns]
    return render_fragment(
        "area.html",
        title=f"{length} on {rank_list(area.ranks) if len(area.ranks) <= _MIN_SUMMARIZED else _count_ranks(area)}",
        begin=format_timestamp_ns(area.from_ns),
        end=format_timestamp_ns(area.to_ns),
        steps=_name_steps(sorted(touched)),
        groups=[(heading, columns) for heading, columns in groups if columns],
        extremes=_build_extremes(table, names) if len(table) >= _MIN_SUMMARIZED else [],
        rows=[
            (rank, [(value, _format(name, value)) for name, value in zip(names, values, strict=True)])
            for rank, values in zip(table["rank"].tolist(), table[names].to_numpy().tolist(), strict=True)
        ],
    )


def _name_steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) != 1)} {format_ranks(steps)}" if steps else "no finished step"


def _count_ranks(area: Area) -> str:
    return count_of(len(area.ranks), "rank")


def _is_shown(table: pd.DataFrame, name: str) -> bool:
    return name in _ALWAYS or bool(table[name].any())


def _build_extremes(table: pd.DataFrame, names: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return, for the most, the median and the least, the value in each column, and its rank unless all are equal."""
    ranks = table["rank"].tolist()
    found = [(name, find_extremes(table[name].to_numpy(), ranks)) for name in names]

    def describe(name: str, of_column: Mapping[str, tuple[int, int]], which: str) -> tuple[str, str]:
        rank, value = of_column[which]
        return _format(name, value), f"rank {rank}" if of_column["most"][1] > of_column["least"][1] else ""

    return [
        (which, [describe(name, of_column, which) for name, of_column in found])
        for which in ("most", "median", "least")
    ]


def _format(name: str, value: int) -> str:
    return "0" if value == 0 else _FORMATS.get(name, format_ns)(value)
