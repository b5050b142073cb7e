"""Render tables of a report as pandas DataFrames with raw values, for notebooks and downloads."""

from __future__ import annotations

from typing import Any

import pandas as pd

from overlapscope.interval import Interval
from overlapscope.report.report import Table
from overlapscope.text import Value


def render_frame(table: Table) -> pd.DataFrame:
    """Return one row per row of the table; an interval has three columns: ``KEY``, ``KEY_low`` and ``KEY_high``."""
    keys = dict.fromkeys(column.key for column in table.columns)
    rows = [{name: cell for key in keys for name, cell in _cells(key, row.get(key))} for row in table.rows]
    return pd.DataFrame(rows)


def _cells(key: str, value: Value) -> list[tuple[str, Any]]:
    if isinstance(value, Interval):
        return [(key, value.value), (f"{key}_low", value.low), (f"{key}_high", value.high)]
    return [(key, value)]
