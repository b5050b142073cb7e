"""Output of ``overlapscope compare``: text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.analysis.compare.changes import Change, Difference
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.sentences import verdict
from overlapscope.analysis.compare.tables import facts_of, tables_of
from overlapscope.commands.json_text import json_text

_LEAST_WIDTH: Final = 120
"""Width that fits every table of numbers, so that none is cut off on a narrower terminal or in a pipe."""


def print_text(found: Comparison, parts: Sequence[str], fail_above: float) -> None:
    """Print facts, the verdict and the tables as text to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    for line in (*facts_of(found), ""):
        console.print(line, markup=False)
    for sentence in verdict(found, parts, fail_above):
        console.print(sentence, style="bold", markup=False)
    for section in tables_of(found):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for place, heading in enumerate(section.headings):
            has_numbers = section.words < len(section.headings)
            table.add_column(
                heading, justify="left" if place < section.words else "right", no_wrap=has_numbers, overflow="fold"
            )
        for row in section.rows:
            table.add_row(*row)
        console.print(f"\n{section.title}", markup=False)
        console.print(table, markup=False)


def as_markdown(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Format the comparison as Markdown, for a CI job summary or a comment."""
    lines = ["## OverlapScope: comparison", ""]
    lines += [f"**{_escaped(sentence)}**" for sentence in verdict(found, parts, fail_above)]
    lines += ["", *(f"- {_escaped(line)}" for line in facts_of(found))]
    for section in tables_of(found):
        marks = [" :-- " if place < section.words else " --: " for place in range(len(section.headings))]
        rows = [section.headings, *section.rows]
        cells = [[f" {_escaped(cell)} " for cell in row] for row in rows]
        table = [f"|{'|'.join(row)}|" for row in (cells[0], marks, *cells[1:])]
        lines += ["", f"### {_escaped(section.title)}", "", *table]
    return "\n".join(lines)


def as_json(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Format the complete comparison as JSON; the keys are documented in ``docs/json.md``."""
    content = {
        "schema": 1,
        "sentences": verdict(found, parts, fail_above),
        "fail_above": fail_above,
        "outcomes": {part: found.outcome(part, fail_above) for part in parts},
        "unlike": found.unlike,
        **{
            name: {
                "path": str(side.trace.path),
                "choice": side.choice,
                "steps": len(side.steps),
                "ranks": side.summary.ranks,
                "apart": side.summary.alike.apart,
                "problems": side.trace.problems,
            }
            for name, side in (("base", found.base), ("new", found.new))
        },
        "parts": {name: _change(found, change) for name, change in found.changes.items()},
        "critical_path": None
        if found.job is None
        else {name: _change(found, change) for name, change in found.job.items()},
        "buckets": [
            {
                "model": bucket.model,
                "base": bucket.base,
                "new": bucket.new,
                "base_bytes": bucket.base_bytes,
                "new_bytes": bucket.new_bytes,
                "exposed": _change(found, bucket.exposed),
                "transfer": None if bucket.transfer is None else _change(found, bucket.transfer),
            }
            for bucket in found.buckets
        ],
        "steps": found.steps,
        "settings": found.settings,
    }
    return json_text(content)


def _change(found: Comparison, change: Change) -> dict[str, object]:
    mean, middle = (_difference(found, each) for each in (change.mean, change.middle))
    return {"mean": mean, "middle": middle, "seen_ns": change.seen_ns}


def _difference(found: Comparison, change: Difference) -> dict[str, object]:
    return {
        "base_ns": change.base,
        "new_ns": change.new,
        "difference_ns": change.ns,
        "share": change.ns.times(1 / found.step.mean.base),
    }


def _escaped(text: str) -> str:
    """Escape the characters that have a meaning in Markdown."""
    for mark in "\\`*_|<>":
        text = text.replace(mark, f"\\{mark}")
    return text
