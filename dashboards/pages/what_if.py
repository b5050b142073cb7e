"""What-if tables: what each rank, host, phase and bucket costs, and what a step would take without that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from overlapscope.analysis.sentences import PART_LABELS, describe_equal_ranks
from overlapscope.analysis.stragglers import Stragglers
from overlapscope.units import format_bytes, format_ns, format_share

MAX_SHOWN_ROWS: Final = 16
"""Number of rows shown; further ones are folded."""

Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WhatIfTable:
    """A table of the page; the first column names the row."""

    title: str
    note: str
    columns: Cells
    rows: tuple[Cells, ...]


def build_what_if_tables(found: Stragglers) -> list[WhatIfTable]:
    """Return all what-if tables; that of hosts only if there are several."""
    tables = [_build_rank_table(found)]
    if len(found.by_host) > 1:
        tables.append(_build_host_table(found))
    return [*tables, _build_phase_table(found), _build_bucket_table(found)]


def _build_rank_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (
            str(row["rank"]),
            str(row["host"]),
            _format_signed_ns(row["lateness_ns"]),
            format_share(row["critical_share"]),
            format_ns(row["cost_ns"]),
            format_share(row["slowdown"]),
            format_ns(found.step_time_ns - row["saving_ns"]),
        )
        for row in _sort_by_cost(found.by_rank)
    )
    return WhatIfTable(
        title="By rank",
        note=f"cost: this rank as it is, otherwise {describe_equal_ranks(found.cycles)}",
        columns=("Rank", "Host", "Lateness", "On the critical path", "Cost", "Slowdown", "Step time if fixed"),
        rows=rows,
    )


def _build_host_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (str(row["host"]), str(row["ranks"]), format_ns(row["cost_ns"]), format_share(row["slowdown"]))
        for row in _sort_by_cost(found.by_host)
    )
    return WhatIfTable(
        title="By host",
        note=f"this host as it is, otherwise {describe_equal_ranks(found.cycles)}",
        columns=("Host", "Ranks", "Cost", "Slowdown"),
        rows=rows,
    )


def _build_phase_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (PART_LABELS[row["cause"]].capitalize(), format_ns(row["cost_ns"]), format_share(row["slowdown"]))
        for row in _sort_by_cost(found.by_cause)
    )
    return WhatIfTable(
        title="By phase",
        note="cost: only the differences between ranks in this phase",
        columns=("Phase", "Cost", "Slowdown"),
        rows=rows,
    )


def _build_bucket_table(found: Stragglers) -> WhatIfTable:
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
        for row in _sort_by_cost(found.by_bucket)
    )
    return WhatIfTable(
        title="By bucket",
        note="cost: transfer time above the best, as far as it is not hidden",
        columns=("Bucket", "Size", "Transfer", "Best", "Busbw", "Cost", "Slowdown"),
        rows=rows,
    )


def _sort_by_cost(table: pd.DataFrame) -> list[Any]:
    return table.sort_values("cost_ns", ascending=False, kind="stable").to_dict("records")


def _format_signed_ns(time_ns: float) -> str:
    sign = "+" if time_ns > 0 else "\N{MINUS SIGN}" if time_ns < 0 else ""
    return f"{sign}{format_ns(abs(time_ns))}"
