"""The text and the JSON of ``overlapscope recommend``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.analysis.advice import Advice
from overlapscope.analysis.choices import choice_sentences
from overlapscope.commands.json_text import json_text
from overlapscope.model import sentences
from overlapscope.model.plan import caps_setting
from overlapscope.model.recommend import Prediction, Recommendation
from overlapscope.trace.reader import Trace
from overlapscope.units import format_bytes, format_ns, format_share

_LEAST_WIDTH: Final = 100


def print_text(trace: Trace, advice: Advice, plan_path: Path | None) -> None:
    """Print the advice and what it rests on, as text, to stdout.

    Args:
        plan_path: the file that the plan was written to, if any.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    found = advice.recommendation
    console.print(_facts(trace, advice), markup=False)
    for sentence in choice_sentences(trace.run):
        console.print(sentence, markup=False)
    console.print()
    console.print(sentences.headline(found), style="bold", markup=False)
    for sentence in _unsure(advice):
        console.print(sentence, markup=False)
    if found.has_choice:
        console.print("\nPredicted step time by bucket size")
        console.print(_size_table(found))
    if error := sentences.error_of_model(found):
        console.print(error, markup=False)
    console.print(sentences.limit(found.limits), markup=False)
    console.print(sentences.free_plan(found), markup=False)
    if found.is_free_faster and found.free_caps_mb is not None:
        console.print(f"  In torch's own DDP: {caps_setting(found.free_caps_mb)}", markup=False)
    if plan_path is not None:
        console.print(f"  Written to {plan_path}: DistributedDataParallel(bucket_plan=...) takes it.", markup=False)
    console.print("\nWhat if, each with the best size for it")
    console.print(_what_if_table(found))
    for assumption in dict.fromkeys(each.assumption for each in found.what_ifs if each.assumption):
        changes = ", ".join(each.change for each in found.what_ifs if each.assumption == assumption)
        console.print(f"  {changes}: {assumption}.", markup=False)


def as_json(trace: Trace, advice: Advice) -> str:
    """The complete advice, for programs; ``docs/json.md`` says what the keys mean."""
    observations, found = advice.fitted.observations, advice.recommendation
    content: dict[str, Any] = {
        "schema": 1,
        "path": str(trace.path),
        "ranks": observations.ranks.tolist(),
        "steps": observations.steps.tolist(),
        "world_size": observations.world_size,
        "has_common_clock": observations.has_common_clock,
        "parameters": [parameter.name for parameter in advice.parameters],
        "sentences": [sentences.headline(found), *_unsure(advice), sentences.limit(found.limits)],
        "problems": trace.problems,
    }
    return json_text(content | found.as_dict())


def _facts(trace: Trace, advice: Advice) -> str:
    observations = advice.fitted.observations
    plans = len({int(plan) for plan in observations.plan})
    gradients = observations.gradients
    parts = [
        f"{trace.path}: {len(observations.steps)} steps of {observations.world_size} ranks",
        f"{len(gradients.names)} gradients of {format_bytes(gradients.total_bytes)}",
        "1 bucket plan" if plans == 1 else f"{plans} bucket plans",
    ]
    if advice.is_calibrated:
        parts.append("a calibration")
    return ", ".join(parts)


def _unsure(advice: Advice) -> Iterator[str]:
    """What to know before one believes it."""
    yield from advice.recommendation.missing
    if not advice.fitted.observations.has_common_clock:
        yield "The ranks' clocks can't be compared, so waits and transfers are told apart rank by rank."
    if advice.missing_ranks:
        ranks = f"{advice.missing_ranks} of {advice.fitted.observations.world_size} ranks"
        yield f"{ranks} left no log: time spent waiting for them looks like transfer."
    if advice.other_models:
        yield f"This is for the DDP model that reduces most; {advice.other_models} more in this run reduce less."


def _size_table(found: Recommendation) -> Table:
    table = _table("bucket_cap_mb", "buckets", "step", "90 % interval", "exposed", "recorded")
    rows = list(found.sizes)
    if found.default.buckets not in {row.buckets for row in rows}:
        rows.append(found.default)
    if found.now.buckets not in {row.buckets for row in rows}:
        rows.append(found.now)
    for row in rows:
        step = row.step_ns
        table.add_row(
            ", ".join([_label(row), *_marks(row, found)]),
            str(len(row.buckets)),
            format_ns(step.value),
            f"{format_ns(step.low)} to {format_ns(step.high)}",
            format_ns(row.exposed_ns),
            "" if row.recorded_ns is None else format_ns(row.recorded_ns.value),
        )
    return table


def _label(row: Prediction) -> str:
    return sentences.band(row.low_mb, row.high_mb) or ("DDP's default" if row.is_default else "other")


def _marks(row: Prediction, found: Recommendation) -> Iterator[str]:
    if row.buckets == found.best.buckets:
        yield "best"
    if row.buckets == found.now.buckets:
        yield "now"


def _what_if_table(found: Recommendation) -> Table:
    table = _table("", "bucket_cap_mb", "step", "gain")
    for each in found.what_ifs:
        table.add_row(each.change, _cap(each.cap_mb), format_ns(each.step_ns), format_share(each.gain))
    return table


def _cap(cap_mb: float | None) -> str:
    return "default" if cap_mb is None else f"{cap_mb:g}"


def _table(label: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(label, no_wrap=True, min_width=13)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
