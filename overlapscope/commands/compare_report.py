"""The text, the Markdown and the JSON of ``overlapscope compare``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.account.wording import BLOCK_LABELS, REASON_LABELS, apart_text
from overlapscope.analysis.compare.buckets import BucketChange
from overlapscope.analysis.compare.changes import Change, Difference
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.sentences import MIDDLE, signed_percent, verdict
from overlapscope.analysis.compare.side import Side
from overlapscope.analysis.models import describe_models
from overlapscope.commands.json_text import json_text
from overlapscope.interval import Interval
from overlapscope.units import format_bytes

_LEAST_WIDTH: Final = 110
"""Width in which every table of numbers fits, so that they are not cut off on a narrower terminal or in a pipe."""


@dataclass(frozen=True)
class _Section:
    """A table, however it is printed."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """How many columns, from the left, hold words; the others hold numbers."""


def print_text(found: Comparison, parts: Sequence[str], fail_above: float) -> None:
    """Print facts, the verdict and the tables, as text, to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    for line in (*_facts(found), ""):
        console.print(line, markup=False)
    for sentence in verdict(found, parts, fail_above):
        console.print(sentence, style="bold", markup=False)
    for section in _sections(found):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for place, heading in enumerate(section.headings):
            is_number = place >= section.words
            table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
        for row in section.rows:
            table.add_row(*row)
        console.print(f"\n{section.title}", markup=False)
        console.print(table, markup=False)


def as_markdown(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """The same as Markdown, for a summary of a job or a comment."""
    lines = ["## OverlapScope: comparison", ""]
    lines += [f"**{_escaped(sentence)}**" for sentence in verdict(found, parts, fail_above)]
    lines += ["", *(f"- {_escaped(line)}" for line in _facts(found))]
    for section in _sections(found):
        marks = [" :-- " if place < section.words else " --: " for place in range(len(section.headings))]
        rows = [section.headings, *section.rows]
        cells = [[f" {_escaped(cell)} " for cell in row] for row in rows]
        table = [f"|{'|'.join(row)}|" for row in (cells[0], marks, *cells[1:])]
        lines += ["", f"### {_escaped(section.title)}", "", *table]
    return "\n".join(lines)


def as_json(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """The complete comparison, for programs; ``docs/json.md`` says what the keys mean."""
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


def _facts(found: Comparison) -> Iterator[str]:
    for label, side in (("Base", found.base), ("New", found.new)):
        yield f"{label}: {side.name}: {_facts_of(side)}"
    if found.unlike:
        yield f"Not the same job: {'; '.join(found.unlike)}."


def _facts_of(side: Side) -> str:
    alike = side.summary.alike
    facts = [describe_models(side.trace.run) or "unknown model"]
    facts.append(f"means of {len(side.steps)} steps of {side.summary.ranks} rank{'s' * (side.summary.ranks != 1)}")
    if alike.apart:
        facts.append(f"kept apart: {apart_text(alike.apart)}")
    return ", ".join(facts)


def _sections(found: Comparison) -> Iterator[_Section]:
    yield _account(found)
    if found.buckets:
        yield _buckets(found)
    if found.steps:
        yield _steps(found)
    if found.settings:
        rows = tuple((each.name, each.base, each.new) for each in found.settings)
        yield _Section("Settings and environment that differ", ("setting", "base", "new"), rows, words=3)


def _account(found: Comparison) -> _Section:
    rows: list[tuple[str, ...]] = []

    def add(label: str, change: Change, on_path: Change | None) -> None:
        mean, path = change.mean, on_path.mean if on_path else None
        if mean.base or mean.new or (path and (path.base or path.new)):
            cells = [] if found.job is None else [_signed_ms(path.ns.value) if path else ""]
            rows.append((label, *_cells(found, mean), *cells))

    for name, label in BLOCK_LABELS.items():
        add(label, found.changes[name], found.job[name] if found.job else None)
        if name == "exposed":
            for reason, text in REASON_LABELS.items():
                add(f"\N{NO-BREAK SPACE} {text}", found.changes[f"exposed_{reason}"], None)
    add("step", found.step, found.step)
    middle = _cells(found, found.step.middle)
    rows.append((f"middle {MIDDLE} of steps", *middle, *([""] if found.job else [])))
    headings = ("", "base", "new", "difference", "99 %", "of the step", *(["critical path"] if found.job else []))
    return _Section("What a step consists of, in milliseconds", headings, tuple(rows))


def _buckets(found: Comparison) -> _Section:
    rows = []
    for bucket in found.buckets:
        size = format_bytes(bucket.new_bytes or bucket.base_bytes)
        changes = [_middle_cells(change) for change in (bucket.transfer, bucket.exposed)]
        rows.append((_bucket_label(found, bucket), size, *changes[0], *changes[1]))
    headings = ("bucket", "size", "transfer: base", "new", "99 %", "exposed: base", "new", "99 %")
    return _Section(f"Buckets in the middle {MIDDLE} of steps, in milliseconds", headings, tuple(rows))


def _bucket_label(found: Comparison, bucket: BucketChange) -> str:
    sides = [", ".join(map(str, numbers)) or "none" for numbers in (bucket.base, bucket.new)]
    model = f"model {bucket.model}: " if len({each.model for each in found.buckets}) > 1 else ""
    return model + (sides[0] if sides[0] == sides[1] else " → ".join(sides))


def _steps(found: Comparison) -> _Section:
    rows = []
    for pair in found.steps:
        step = str(pair.base_step) if pair.base_step == pair.new_step else f"{pair.base_step} → {pair.new_step}"
        block = [BLOCK_LABELS[pair.block], _ms(pair.base_block_ns), _ms(pair.new_block_ns)]
        rows.append((step, *block, _ms(pair.base_ns), _ms(pair.new_ns), _signed_ms(pair.new_ns - pair.base_ns)))
    headings = ("step", "mostly in", "base", "new", "step: base", "new", "difference")
    return _Section("Steps that differ most, in milliseconds", headings, tuple(rows), words=2)


def _cells(found: Comparison, change: Difference) -> tuple[str, ...]:
    share = signed_percent(found.share(change.ns.value))
    return _ms(change.base), _ms(change.new), _signed_ms(change.ns.value), _interval(change.ns), share


def _middle_cells(change: Change | None) -> tuple[str, str, str]:
    if change is None:
        return "", "", ""
    return _ms(change.middle.base), _ms(change.middle.new), _interval(change.middle.ns)


def _interval(interval: Interval) -> str:
    return "" if math.isnan(interval.low) else f"{_signed_ms(interval.low)} to {_signed_ms(interval.high)}"


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.2f}"


def _signed_ms(time_ns: float) -> str:
    text = f"{time_ns / 1e6:+.2f}".replace("-", "\N{MINUS SIGN}")
    return "0.00" if text[1:] == "0.00" else text


def _escaped(text: str) -> str:
    """Text in which nothing is taken for Markdown."""
    for mark in "\\`*_|<>":
        text = text.replace(mark, f"\\{mark}")
    return text
