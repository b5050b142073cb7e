"""What-if tables: what each rank, host, phase and bucket costs, and what a step would take without that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from overlapscope.analysis.sentences import PART_LABELS, all_alike
from overlapscope.analysis.stragglers import Stragglers
from overlapscope.units import format_bytes, format_ns, format_share

SHOWN_ROWS: Final = 16
"""Number of rows shown; further ones are folded."""

Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page; the first column names the row."""

    title: str
    note: str
    columns: Cells
    rows: tuple[Cells, ...]


def what_if_tables(found: Stragglers) -> list[Table]:
    """Return all what-if tables; that of hosts only if there are several."""
    tables = [_ranks(found)]
    if len(found.by_host) > 1:
        tables.append(_hosts(found))
    return [*tables, _phases(found), _buckets(found)]


def _ranks(found: Stragglers) -> Table:
    rows = tuple(
        (
            str(row["rank"]),
            str(row["host"]),
            _signed_ns(row["lateness_ns"]),
            format_share(row["critical_share"]),
            format_ns(row["cost_ns"]),
            format_share(row["slowdown"]),
            format_ns(found.step_time_ns - row["saving_ns"]),
        )
        for row in _most_expensive(found.by_rank)
    )
    return Table(
        title="By rank",
        note=f"cost: this rank as it is, otherwise {all_alike(found.cycles)}",
        columns=("Rank", "Host", "Lateness", "On the critical path", "Cost", "Slowdown", "Step time if fixed"),
        rows=rows,
    )


def _hosts(found: Stragglers) -> Table:
    rows = tuple(
        (str(row["host"]), str(row["ranks"]), format_ns(row["cost_ns"]), format_share(row["slowdown"]))
        for row in _most_expensive(found.by_host)
    )
    return Table(
        title="By host",
        note=f"this host as it is, otherwise {all_alike(found.cycles)}",
        columns=("Host", "Ranks", "Cost", "Slowdown"),
        rows=rows,
    )


def _phases(found: Stragglers) -> Table:
    rows = tuple(
        (PART_LABELS[row["cause"]].capitalize(), format_ns(row["cost_ns"]), format_share(row["slowdown"]))
        for row in _most_expensive(found.by_cause)
    )
    return Table(
        title="By phase",
        note="cost: only the differences between ranks in this phase",
        columns=("Phase", "Cost", "Slowdown"),
        rows=rows,
    )


def _buckets(found: Stragglers) -> Table:
    rows = tuple(
        (
            str(row["bucket"]) if row["bucket"] >= 0 else "no bucket",
            format_bytes(row["bytes"]),
            format_ns(row["transfer_ns"]),
            format_ns(row["best_ns"]),
            "–" if math.isnan(row["busbw_bytes_per_s"]) else f"{row['busbw_bytes_per_s'] / 1e9:.3g} GB/s",
            format_ns(row["cost_ns"]),
            format_share(row["slowdown"]),
        )
        for row in _most_expensive(found.by_bucket)
    )
    return Table(
        title="By bucket",
        note="cost: transfer time above the best, as far as it is not hidden",
        columns=("Bucket", "Size", "Transfer", "Best", "Busbw", "Cost", "Slowdown"),
        rows=rows,
    )


def _most_expensive(table: pd.DataFrame) -> list[Any]:
    return table.sort_values("cost_ns", ascending=False, kind="stable").to_dict("records")


def _signed_ns(time_ns: float) -> str:
    sign = "+" if time_ns > 0 else "\N{MINUS SIGN}" if time_ns < 0 else ""
    return f"{sign}{format_ns(abs(time_ns))}"
