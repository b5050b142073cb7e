"""Output of ``overlapscope compare``: text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.compare.changes import Change, TimeDifference
from overlapscope.compare.comparison import Comparison
from overlapscope.compare.text import build_tables, describe_outcomes, describe_sides
from overlapscope.report.json import json_text

_MIN_WIDTH: Final = 120
"""Width that fits every table of numbers, so that none is cut off on a narrower terminal or in a pipe."""


def print_text(comparison: Comparison, parts: Sequence[str], fail_above: float) -> None:
    """Print facts, the verdict and the tables as text to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _MIN_WIDTH)
    for line in (*describe_sides(comparison), ""):
        console.print(line, markup=False)
    for sentence in describe_outcomes(comparison, parts, fail_above):
        console.print(sentence, style="bold", markup=False)
    for section in build_tables(comparison):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for index, heading in enumerate(section.headings):
            has_numbers = section.words < len(section.headings)
            table.add_column(
                heading, justify="left" if index < section.words else "right", no_wrap=has_numbers, overflow="fold"
            )
        for row in section.rows:
            table.add_row(*row)
        console.print(f"\n{section.title}", markup=False)
        console.print(table, markup=False)


def as_markdown(comparison: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Format the comparison as Markdown, for a CI job summary or a comment."""
    lines = ["## OverlapScope: comparison", ""]
    lines += [f"**{_escape_markdown(sentence)}**" for sentence in describe_outcomes(comparison, parts, fail_above)]
    lines += ["", *(f"- {_escape_markdown(line)}" for line in describe_sides(comparison))]
    for section in build_tables(comparison):
        marks = [" :-- " if index < section.words else " --: " for index in range(len(section.headings))]
        rows = [section.headings, *section.rows]
        cells = [[f" {_escape_markdown(cell)} " for cell in row] for row in rows]
        table = [f"|{'|'.join(row)}|" for row in (cells[0], marks, *cells[1:])]
        lines += ["", f"### {_escape_markdown(section.title)}", "", *table]
    return "\n".join(lines)


def as_json(comparison: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Format the complete comparison as JSON; the keys are documented in ``docs/json.md``."""
    content = {
        "schema": 1,
        "sentences": describe_outcomes(comparison, parts, fail_above),
        "fail_above": fail_above,
        "outcomes": {part: comparison.outcome(part, fail_above) for part in parts},
        "unlike": comparison.unlike,
        **{
            name: {
                "path": str(side.trace.path),
                "choice": side.choice,
                "steps": len(side.steps),
                "ranks": side.summary.ranks,
                "excluded": side.summary.steady.excluded,
                "problems": side.trace.problems,
            }
            for name, side in (("base", comparison.base), ("new", comparison.new))
        },
        "parts": {name: _change(comparison, change) for name, change in comparison.changes.items()},
        "critical_path": None
        if comparison.job is None
        else {name: _change(comparison, change) for name, change in comparison.job.items()},
        "buckets": [
            {
                "model": bucket.model,
                "base": bucket.base,
                "new": bucket.new,
                "base_bytes": bucket.base_bytes,
                "new_bytes": bucket.new_bytes,
                "exposed": _change(comparison, bucket.exposed),
                "transfer": None if bucket.transfer is None else _change(comparison, bucket.transfer),
            }
            for bucket in comparison.buckets
        ],
        "steps": comparison.steps,
        "settings": comparison.settings,
    }
    return json_text(content)


def _change(comparison: Comparison, change: Change) -> dict[str, object]:
    mean, middle = (_difference(comparison, each) for each in (change.mean, change.middle))
    return {"mean": mean, "middle": middle, "seen_ns": change.seen_ns}


def _difference(comparison: Comparison, change: TimeDifference) -> dict[str, object]:
    return {
        "base_ns": change.base,
        "new_ns": change.new,
        "difference_ns": change.ns,
        "share": change.ns.times(1 / comparison.step.mean.base),
    }


def _escape_markdown(text: str) -> str:
    """Escape the characters that have a meaning in Markdown."""
    for mark in "\\`*_|<>":
        text = text.replace(mark, f"\\{mark}")
    return text
