"""Output of ``overlapscope summary``: text and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.breakdown.labels import BLOCK_LABELS, REASON_LABELS, describe_excluded, describe_uncounted_ranks
from overlapscope.breakdown.summary import Summary
from overlapscope.diagnosis.attempts import read_attempts
from overlapscope.interval import Interval
from overlapscope.report.diagnose import attempts_json
from overlapscope.report.json import json_text
from overlapscope.text import format_share
from overlapscope.trace.description import describe_chosen_steps, describe_clocks, describe_models, describe_strategies
from overlapscope.trace.recording import Trace

_MIN_WIDTH: Final = 80
"""Width that fits every table, so that lines are not cut off on a narrower terminal or in a pipe."""
_STEPS_AT_EACH_END: Final = 3
_MAX_RANKS_WITH_STEPS: Final = 8
"""Number of ranks whose steps the text shows; of more ranks, it shows only the means."""
_TIMES: Final = ("step_time_ns", "compute_ns", "communication_ns", "hidden_ns", "exposed_ns")
_HEADINGS: Final = ("step time", "compute", "comm.", "hidden", "exposed", "ratio")


def print_text(trace: Trace, summary: Summary) -> None:
    """Print facts, tables and the verdict as text to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _MIN_WIDTH)
    console.print(_facts(trace), markup=False)
    if len(summary.figures):
        counted = f"{_count(summary.steps, 'step')} of {_count(summary.ranks, 'rank')}"
        console.print(f"\nWhat a step consists of: means of {counted}, in milliseconds")
        console.print(_breakdown_table(summary))
        if summary.steady.excluded:
            console.print(f"Kept apart: {describe_excluded(summary.steady.excluded)}.", markup=False)
        if summary.steady.excluded_ranks:
            console.print(describe_uncounted_ranks(summary.steady.excluded_ranks))
        console.print()
        console.print("Ranks: means of the same steps, in milliseconds")
        console.print(_rank_table(summary))
        console.print("Steps, in milliseconds")
        console.print(_step_table(summary))
    console.print(summary.sentence, style="bold", markup=False)


def as_json(trace: Trace, summary: Summary) -> str:
    """Format the complete summary as JSON; the keys are documented in ``docs/json.md``."""
    content = {
        "schema": 1,
        "path": str(trace.path),
        "attempts": attempts_json(read_attempts(trace.path)),
        "run": trace.run,
        "sentence": summary.sentence,
        "breakdown": {
            "ranks": summary.ranks,
            "steps": summary.steps,
            "excluded": summary.steady.excluded,
            "excluded_ranks": summary.steady.excluded_ranks,
            "step_ns": summary.mean.step,
            "blocks_ns": summary.mean.blocks,
            "exposed_for_ns": summary.exposed_for,
            "critical_path_ns": None if summary.job is None else summary.job.blocks,
            "hidden_ns": summary.hidden,
            "overlap_ratio": summary.overlap_ratio,
        },
        "ranks": summary.means_by_rank().to_dict("records"),
        "steps": summary.figures.assign(is_counted=summary.is_steady).to_dict("records"),
        "problems": trace.problems,
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
    facts += [f"strategy {strategy}"] if (strategy := describe_strategies(run)) else []
    facts += [_count(trace.steps["step"].nunique(), "step") + describe_chosen_steps(trace)]
    facts += [f"{name} {version}" for name, version in run.get("versions", {}).items() if name == "torch"]
    if "started_unix_ns" in run:
        started = datetime.fromtimestamp(run["started_unix_ns"] / 1e9)
        facts.append(f"recorded {started:%Y-%m-%d %H:%M}")
    return ", ".join(facts)


def _breakdown_table(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("mean", "90 %", "share", *(["critical path"] if summary.job is not None else [])):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(label: str, mean: Interval, on_path: Interval | None) -> None:
        between = "" if math.isnan(mean.low) else f"{_ms(mean.low)} to {_ms(mean.high)}"
        cells = [_ms(mean.value), between, format_share(summary.share_of(mean))]
        table.add_row(label, *cells, *([] if summary.job is None else [_ms(on_path.value) if on_path else ""]))

    for name, mean in summary.mean.blocks.items():
        on_path = summary.job.blocks[name] if summary.job is not None else None
        if mean.value or (on_path is not None and on_path.value):
            add(BLOCK_LABELS[name], mean, on_path)
        if name == "exposed":
            for reason, part in summary.exposed_for.items():
                if part.value:
                    add(f"  {REASON_LABELS[reason]}", part, None)
    table.add_section()
    add("step", summary.mean.step, summary.mean.step)
    return table


def _rank_table(summary: Summary) -> Table:
    table = _table("rank", "steps")
    for row in summary.means_by_rank().to_dict("records"):
        table.add_row(str(row["rank"]), str(row["steps_counted"]), *_cells(row))
    return table


def _step_table(summary: Summary) -> Table:
    table = _table("rank", "step")
    by_rank = list(summary.figures.groupby("rank"))
    for rank, steps in by_rank[:_MAX_RANKS_WITH_STEPS]:
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
    if len(by_rank) > _MAX_RANKS_WITH_STEPS:
        table.caption = f"The steps of {len(by_rank) - _MAX_RANKS_WITH_STEPS} more ranks: --json"
    return table


def _table(*keys: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for heading in (*keys, *_HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(row: Mapping[Any, Any]) -> list[str]:
    ratio = row["overlap_ratio"]
    return [_ms(row[name]) for name in _TIMES] + ["none" if math.isnan(ratio) else f"{ratio:.2f}"]


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.2f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
