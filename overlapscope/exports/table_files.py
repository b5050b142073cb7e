"""The tables of a recording as CSV or Parquet files, one each."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, Final, Literal

import pandas as pd

from overlapscope.analysis.analysis import Analysis

TableFormat = Literal["csv", "parquet"]

_ROWS: Final = 20_000
"""Number of rows converted to CSV at a time, so that a table of millions is not in memory as text too."""


def collect_tables(analysis: Analysis) -> dict[str, pd.DataFrame]:
    """Return the non-empty tables of a recording by name: ``account`` (breakdown of each step) and those recorded."""
    trace = analysis.trace
    tables = {
        "account": analysis.summary.figures.assign(is_counted=analysis.summary.is_steady),
        **{name: getattr(trace, name) for name in ("ranks", "steps", "phases", "gradients", "copies", "collectives")},
        **{name: getattr(trace, name) for name in ("segments", "user_collectives", "pauses", "incidents", "links")},
        **{name: getattr(trace, name) for name in ("plans", "call_sites")},
    }
    return {name: table for name, table in tables.items() if len(table)}


def write_table(table: pd.DataFrame, file: IO[bytes], kind: TableFormat) -> None:
    """Write a table to a file opened in binary mode."""
    if kind == "parquet":
        file.write(encode_parquet(table))
    else:
        file.writelines(generate_csv(table))


def generate_csv(table: pd.DataFrame) -> Iterator[bytes]:
    """Generate a table as CSV, some rows at a time."""
    for begin in range(0, max(1, len(table)), _ROWS):
        rows = table.iloc[begin : begin + _ROWS]
        yield rows.to_csv(index=False, header=not begin, lineterminator="\n").encode()


def encode_parquet(table: pd.DataFrame) -> bytes:
    """Return a table as the content of a Parquet file."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
