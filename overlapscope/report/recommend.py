"""Output of ``overlapscope recommend``: text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.advice.advice import Advice
from overlapscope.advice.auto_choices import describe_auto_choices
from overlapscope.bucket_model import text
from overlapscope.bucket_model.plans import format_caps
from overlapscope.bucket_model.text import (
    SIZE_COLUMNS,
    WHAT_IF_COLUMNS,
    list_assumptions,
    make_size_rows,
    make_what_if_rows,
)
from overlapscope.report.json import json_text
from overlapscope.text import format_bytes
from overlapscope.trace.recording import Trace

_MIN_WIDTH: Final = 100


def print_text(trace: Trace, advice: Advice, plan_path: Path | None) -> None:
    """Print the recommendation and its basis as text to stdout.

    Args:
        plan_path: file that the plan was written to, if any.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _MIN_WIDTH)
    found = advice.recommendation
    console.print(_facts(trace, advice), markup=False)
    for sentence in describe_auto_choices(trace.run):
        console.print(sentence, markup=False)
    console.print()
    console.print(text.format_headline(found), style="bold", markup=False)
    for sentence in _caveats(advice):
        console.print(sentence, markup=False)
    if found.has_choice:
        console.print("\nPredicted step time by bucket size")
        console.print(_table(SIZE_COLUMNS, make_size_rows(found)))
    if error := text.format_model_error(found):
        console.print(error, markup=False)
    console.print(text.format_limit(found.limits), markup=False)
    console.print(text.format_free_plan(found), markup=False)
    if found.is_free_faster and found.free_caps_mb is not None:
        console.print(f"  In torch's own DDP: {format_caps(found.free_caps_mb)}", markup=False)
    if plan_path is not None:
        console.print(f"  Written to {plan_path}: DistributedDataParallel(bucket_plan=...) takes it.", markup=False)
    console.print("\nWhat if, each with the best size for it")
    console.print(_table(WHAT_IF_COLUMNS, make_what_if_rows(found)))
    for assumption in list_assumptions(found):
        console.print(f"  {assumption}", markup=False)


def as_json(trace: Trace, advice: Advice) -> str:
    """Format the complete recommendation as JSON; the keys are documented in ``docs/json.md``."""
    observations, found = advice.fitted.observations, advice.recommendation
    content: dict[str, Any] = {
        "schema": 1,
        "path": str(trace.path),
        "ranks": observations.ranks.tolist(),
        "steps": observations.steps.tolist(),
        "world_size": observations.world_size,
        "has_common_clock": observations.has_common_clock,
        "parameters": [parameter.name for parameter in advice.parameters],
        "sentences": [text.format_headline(found), *_caveats(advice), text.format_limit(found.limits)],
        "problems": trace.problems,
    }
    return json_text(content | found.as_dict())


def _facts(trace: Trace, advice: Advice) -> str:
    observations = advice.fitted.observations
    plans = observations.used_plan_count
    gradients = observations.gradients
    parts = [
        f"{trace.path}: {len(observations.steps)} steps of {observations.world_size} ranks",
        f"{len(gradients.names)} gradients of {format_bytes(gradients.total_bytes)}",
        "1 bucket plan" if plans == 1 else f"{plans} bucket plans",
    ]
    if advice.is_calibrated:
        parts.append("a calibration")
    return ", ".join(parts)


def _caveats(advice: Advice) -> Iterator[str]:
    """Generate the caveats of the recommendation."""
    yield from advice.recommendation.missing
    if not advice.fitted.observations.has_common_clock:
        yield "The ranks' clocks can't be compared, so waits and transfers are told apart rank by rank."
    if advice.missing_ranks:
        ranks = f"{advice.missing_ranks} of {advice.fitted.observations.world_size} ranks"
        yield f"{ranks} left no log: time spent waiting for them looks like transfer."
    if advice.other_models:
        yield f"This is for the DDP model that reduces most; {advice.other_models} more in this run reduce less."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0], no_wrap=True, min_width=13)
    for heading in columns[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    return table
