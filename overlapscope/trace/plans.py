"""Table of bucket plans, from ``plans.jsonl``: one row per parameter of a plan.

===== =========================================================================================================
plans model, plan_epoch, plan_hash, bucket, position, parameter, name, shape, elements, dtype, bytes
===== =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pandas as pd

from overlapscope.trace.folders import read_lines
from overlapscope.trace.log import Problem

PLAN_COLUMNS: Final = (
    *("model", "plan_epoch", "plan_hash", "bucket", "position"),
    *("parameter", "name", "shape", "elements", "dtype", "bytes"),
)

PlanRows = tuple[tuple[Any, ...], ...]


def read_plans(path: Path, problems: list[Problem], known: dict[bytes, PlanRows]) -> PlanRows:
    """Read the rows of one rank's file.

    Args:
        known: cache of rows by file content, because the files of all ranks are long and mostly the same.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if content not in known:
        found: list[Problem] = []
        rows = tuple(read_lines(path, found, _parse_plan))
        problems += found
        if found:  # not cached, so that problems are reported for each file
            return rows
        known[content] = rows
    return known[content]


def build_plans_table(plans: Iterable[PlanRows]) -> pd.DataFrame:
    """Return the plans of some ranks, each once."""
    rows = [row for distinct in dict.fromkeys(plans) for row in distinct]
    return pd.DataFrame(rows, columns=list(PLAN_COLUMNS)).drop_duplicates(ignore_index=True)


def _parse_plan(plan: Any) -> list[tuple[Any, ...]]:
    return [
        (
            plan["model"],
            plan["epoch"],
            plan["hash"],
            number,
            position,
            parameter["index"],
            parameter["name"],
            "×".join(map(str, parameter["shape"])) or "scalar",
            parameter["elements"],
            bucket["dtype"],
            parameter["bytes"],
        )
        for number, bucket in enumerate(plan["buckets"])
        for position, parameter in enumerate(bucket["parameters"])
    ]
