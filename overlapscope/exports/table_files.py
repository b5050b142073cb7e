"""The tables of a recording as files: one each, CSV or Parquet."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, Final, Literal

import pandas as pd

from overlapscope.analysis.analysis import Analysis

Kind = Literal["csv", "parquet"]

_ROWS: Final = 20_000
"""Rows of CSV that are made at a time: a table of millions need not be in memory as text too."""


def tables_of(analysis: Analysis) -> dict[str, pd.DataFrame]:
    """All tables of a recording by name, without those that are empty: ``account``, and what was recorded."""
    trace = analysis.trace
    tables = {
        "account": analysis.summary.figures.assign(is_counted=analysis.summary.is_alike),
        **{name: getattr(trace, name) for name in ("ranks", "steps", "phases", "gradients", "copies", "collectives")},
        **{name: getattr(trace, name) for name in ("segments", "user_collectives", "pauses", "incidents", "links")},
        **{name: getattr(trace, name) for name in ("plans", "call_sites")},
    }
    return {name: table for name, table in tables.items() if len(table)}


def write_table(table: pd.DataFrame, file: IO[bytes], kind: Kind) -> None:
    """Write one table."""
    if kind == "parquet":
        file.write(parquet_of(table))
    else:
        file.writelines(csv_parts(table))


def csv_parts(table: pd.DataFrame) -> Iterator[bytes]:
    """A table as CSV, some rows at a time."""
    for begin in range(0, max(1, len(table)), _ROWS):
        rows = table.iloc[begin : begin + _ROWS]
        yield rows.to_csv(index=False, header=not begin, lineterminator="\n").encode()


def parquet_of(table: pd.DataFrame) -> bytes:
    """A table as Parquet."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
