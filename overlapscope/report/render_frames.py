"""Render tables of a report as pandas DataFrames with raw values, for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from overlapscope.interval import Interval
from overlapscope.report.report import Table
from overlapscope.text import Value


def render_frame(table: Table) -> pd.DataFrame:
    """Return a row per row of the table, with all that is known of it, also what no column shows.

    Times are in nanoseconds, in columns ``NAME_ns``. An interval has three columns, such as ``step_ns``,
    ``step_low_ns`` and ``step_high_ns``.
    """
    units = {column.key: column.unit for column in table.columns}
    keys = dict.fromkeys([*units, *(key for row in table.rows for key in row)])
    suffixes = {
        key: "_ns" if units.get(key, "").startswith(("ns", "ms")) or key.endswith("_ns") else "" for key in keys
    }
    return pd.DataFrame(
        [dict(cell for key in keys for cell in _cells(key, suffixes[key], row.get(key))) for row in table.rows]
    )


def _cells(key: str, suffix: str, value: Value) -> Iterator[tuple[str, Any]]:
    name = key.removesuffix(suffix)
    if not isinstance(value, Interval):
        yield f"{name}{suffix}", value
        return
    for part, number in (("", value.value), ("_low", value.low), ("_high", value.high)):
        yield f"{name}{part}{suffix}", number
