"""The text and the JSON of ``overlapscope summary``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.analysis.clocks import describe_clocks
from overlapscope.analysis.models import describe_models
from overlapscope.analysis.summary import after_warm_up, summarise
from overlapscope.commands.json_text import json_text
from overlapscope.trace.reader import Trace

_LEAST_WIDTH: Final = 80
"""Width in which every table fits, so that lines are not cut off on a narrower terminal or in a pipe."""
_STEPS_AT_EACH_END: Final = 3
_RANKS_WITH_STEPS: Final = 8
"""Of more ranks than this the text shows only the medians."""
_TIMES: Final = ("step_time_ns", "compute_ns", "communication_ns", "overlap_ns", "exposed_ns")
_HEADINGS: Final = ("step time", "compute", "comm.", "overlap", "exposed", "ratio")


def print_text(trace: Trace, per_step: pd.DataFrame) -> None:
    """Print facts, tables and the verdict, as text, to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    summary = summarise(per_step)
    console.print(_facts(trace), markup=False)
    if len(per_step):
        left_out = summary.warm_up_steps_left_out
        without = f" without the first {left_out}" if left_out else ""
        console.print(f"\nMedians over {summary.steps_counted} steps{without}, in milliseconds")
        console.print(_rank_table(per_step))
        console.print("Steps, in milliseconds")
        console.print(_step_table(per_step))
    console.print(summary.sentence, style="bold", markup=False)


def as_json(trace: Trace, per_step: pd.DataFrame) -> str:
    """The complete summary, for programs. The help of ``overlapscope summary`` says what the keys mean."""
    content = {
        "path": str(trace.path),
        "run": trace.run,
        "verdict": asdict(summarise(per_step)),
        "ranks": _medians_by_rank(per_step).to_dict("records"),
        "steps": per_step.to_dict("records"),
        "problems": [asdict(problem) for problem in trace.problems],
    }
    return json_text(content)


def _facts(trace: Trace) -> str:
    run = trace.run
    facts = [
        f"{trace.path}: {describe_models(run) or 'unknown model'}",
        f"{len(trace.ranks)} of {run.get('world_size', '?')} ranks",
        describe_clocks(trace),
    ]
    facts += [f"backend {run['backend']}"] if "backend" in run else []
    facts += [f"{trace.steps['step'].nunique()} steps"]
    facts += [f"{name} {version}" for name, version in run.get("versions", {}).items() if name == "torch"]
    if "started_unix_ns" in run:
        started = datetime.fromtimestamp(run["started_unix_ns"] / 1e9)
        facts.append(f"recorded {started:%Y-%m-%d %H:%M}")
    return ", ".join(facts)


def _medians_by_rank(per_step: pd.DataFrame) -> pd.DataFrame:
    counted, _ = after_warm_up(per_step)
    by_rank = counted.drop(columns="step").groupby("rank")
    medians = by_rank.median()
    times = [name for name in medians.columns if name.endswith("_ns")]
    medians[times] = medians[times].round().astype("int64")
    medians.insert(0, "steps_counted", by_rank.size())
    return medians.reset_index()


def _rank_table(per_step: pd.DataFrame) -> Table:
    table = _table("rank", "steps")
    for row in _medians_by_rank(per_step).to_dict("records"):
        table.add_row(str(row["rank"]), str(row["steps_counted"]), *_cells(row))
    return table


def _step_table(per_step: pd.DataFrame) -> Table:
    table = _table("rank", "step")
    by_rank = list(per_step.groupby("rank"))
    for rank, steps in by_rank[:_RANKS_WITH_STEPS]:
        rows = steps.to_dict("records")
        elided = len(rows) - 2 * _STEPS_AT_EACH_END
        if elided <= 1:
            head, tail = rows, []
        else:
            head, tail = rows[:_STEPS_AT_EACH_END], rows[-_STEPS_AT_EACH_END:]
        for row in head:
            table.add_row(str(rank), str(row["step"]), *_cells(row))
        if tail:
            table.add_row("", "...", f"{elided} steps")
        for row in tail:
            table.add_row(str(rank), str(row["step"]), *_cells(row))
        table.add_section()
    if len(by_rank) > _RANKS_WITH_STEPS:
        table.caption = f"The steps of {len(by_rank) - _RANKS_WITH_STEPS} more ranks: --json"
    return table


def _table(*keys: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for heading in (*keys, *_HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(row: Mapping[Any, Any]) -> list[str]:
    ratio = row["overlap_ratio"]
    return [f"{row[name] / 1e6:.2f}" for name in _TIMES] + ["none" if math.isnan(ratio) else f"{ratio:.2f}"]
