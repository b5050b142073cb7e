"""Sentences and labels of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.labels import BLOCK_LABELS, REASON_LABELS, describe_excluded
from overlapscope.compare.buckets import BucketChange
from overlapscope.compare.changes import TRIMMED, Change, TimeDifference
from overlapscope.compare.comparison import Comparison
from overlapscope.compare.side import STEP, ComparisonSide
from overlapscope.interval import Interval
from overlapscope.text import format_bytes, format_ns
from overlapscope.trace.description import describe_models

PART_LABELS: Final = {
    STEP: "step",
    **BLOCK_LABELS,
    **{f"exposed_{reason}": f"exposed: {label}" for reason, label in REASON_LABELS.items()},
    "compute": "compute",
    "communication": "communication",
    "hidden": "hidden communication",
}
MIDDLE: Final = f"{100 * (1 - 2 * TRIMMED):.0f} %"
"""Share of the steps that is left after trimming."""
_MAX_NAMED: Final = 3


def describe_outcomes(found: Comparison, parts: Sequence[str], fail_above: float) -> list[str]:
    """Describe the outcome of each given part in a sentence or two.

    Args:
        parts: Some of ``PARTS``.
        fail_above: As in ``Comparison.outcome``.
    """
    return [_sentence(found, part, fail_above) for part in parts]


def signed_percent(share: float) -> str:
    """Format a share with its sign: ``+3.2 %``, ``−0.4 %``."""
    text = f"{100 * share:+.1f}".replace("-", "\N{MINUS SIGN}")
    return f"{'0.0' if float(text[1:]) == 0 else text} %"


def signed_ns(time_ns: float) -> str:
    """Format a difference of times with its sign: ``+1.70 ms``."""
    sign = "+" if time_ns >= 0 else "\N{MINUS SIGN}"
    return f"{sign}{format_ns(abs(time_ns))}"


def _sentence(found: Comparison, part: str, fail_above: float) -> str:
    outcome = found.outcome(part, fail_above)
    what = "" if part == STEP else f"{PART_LABELS[part]}: "
    if outcome == "no difference seen":
        seen = signed_percent(found.share(found.changes[part].seen_ns)).removeprefix("+")
        nothing = f"no difference that this many steps could show: at least {seen}{_of(part)} would have been seen."
        return _capitalize(what + nothing)
    word = "longer" if outcome.startswith("slower") else "shorter"
    if part == STEP:
        word = "slower" if word == "longer" else "faster"
    if outcome == "slower, but not surely enough":
        word += f", but not surely by more than {100 * fail_above:g} %"
    if part != STEP:
        return _capitalize(f"{what}{word}, {_numbers(found, part)}.")
    return _capitalize(f"{word}: {_numbers(found, part)}.{_describe_blocks(found)}")


def _numbers(found: Comparison, part: str) -> str:
    """Format both sides and the difference, and also that of the mean if the trimmed mean is shown."""
    change = found.changes[part]
    shown = change.most_significant
    low, high = (signed_percent(found.share(edge)) for edge in (shown.ns.low, shown.ns.high))
    text = (
        f"{format_ns(shown.base)} → {format_ns(shown.new)}, {signed_percent(found.share(shown.ns.value))}{_of(part)} "
        f"(99 % interval {low.removesuffix(' %')} to {high})"
    )
    if shown is change.mean:
        return text
    mean = signed_percent(found.share(change.mean.ns.value))
    chance = "" if change.mean.is_significant else ", which could be chance"
    return f"{text} in the middle {MIDDLE} of the steps; {mean} in the mean of all{chance}"


def _describe_blocks(found: Comparison) -> str:
    """Name the blocks that differ beyond noise in that direction, the largest first.

    The difference is that of the mean, as in tables, if it is significant.
    """
    is_longer = found.step.most_significant.is_longer
    sure: list[tuple[float, str]] = []
    for name in BLOCKS:
        change = found.changes[name]
        in_mean, in_either = (
            each.is_longer if is_longer else each.is_shorter for each in (change.mean, change.most_significant)
        )
        if in_either:
            time_ns = (change.mean if in_mean else change.middle).ns.value
            where = "" if in_mean else f" in the middle {MIDDLE} of steps"
            sure.append((abs(time_ns), f"{BLOCK_LABELS[name]} ({signed_ns(time_ns)}{where})"))
    named = [text for _, text in sorted(sure, reverse=True)[:_MAX_NAMED]]
    return f" The difference is in {', '.join(named)}." if named else " No single block differs beyond noise."


def _of(part: str) -> str:
    return "" if part == STEP else " of the step"


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


# Tables of a comparison in words, the same for text, Markdown and the page.


@dataclass(frozen=True)
class ComparisonTable:
    """A table in any output format."""

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """Number of columns, from the left, that hold words; the others hold numbers."""


def describe_sides(found: Comparison) -> Iterator[str]:
    """Yield what is compared, a line each, and whether it is the same job."""
    for label, side in (("Base", found.base), ("New", found.new)):
        yield f"{label}: {side.name}: {_side(side)}"
    if found.unlike:
        yield f"Not the same job: {'; '.join(found.unlike)}."


def _side(side: ComparisonSide) -> str:
    steady = side.summary.steady
    facts = [describe_models(side.trace.run) or "unknown model"]
    facts.append(f"means of {len(side.steps)} steps of {side.summary.ranks} rank{'s' * (side.summary.ranks != 1)}")
    if steady.excluded:
        facts.append(f"kept apart: {describe_excluded(steady.excluded)}")
    return ", ".join(facts)


def build_tables(found: Comparison) -> Iterator[ComparisonTable]:
    """Yield the non-empty tables: breakdown, buckets, the steps that differ most, and settings that differ."""
    yield _breakdown(found)
    if found.buckets:
        yield _buckets(found)
    if found.steps:
        yield _steps(found)
    if found.settings:
        rows = tuple((each.name, each.base, each.new) for each in found.settings)
        yield ComparisonTable(
            "settings", "Settings and environment that differ", ("setting", "base", "new"), rows, words=3
        )


def _breakdown(found: Comparison) -> ComparisonTable:
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
    return ComparisonTable("breakdown", "What a step consists of, in milliseconds", headings, tuple(rows))


def _buckets(found: Comparison) -> ComparisonTable:
    rows = []
    for bucket in found.buckets:
        size = format_bytes(bucket.new_bytes or bucket.base_bytes)
        changes = [_middle_cells(change) for change in (bucket.transfer, bucket.exposed)]
        rows.append((_bucket_label(found, bucket), size, *changes[0], *changes[1]))
    headings = ("bucket", "size", "transfer: base", "new", "99 %", "exposed: base", "new", "99 %")
    return ComparisonTable(
        "buckets", f"Buckets in the middle {MIDDLE} of steps, in milliseconds", headings, tuple(rows)
    )


def _bucket_label(found: Comparison, bucket: BucketChange) -> str:
    sides = [", ".join(map(str, numbers)) or "none" for numbers in (bucket.base, bucket.new)]
    model = f"model {bucket.model}: " if len({each.model for each in found.buckets}) > 1 else ""
    return model + (sides[0] if sides[0] == sides[1] else " → ".join(sides))


def _steps(found: Comparison) -> ComparisonTable:
    rows = []
    for pair in found.steps:
        step = str(pair.base_step) if pair.base_step == pair.new_step else f"{pair.base_step} → {pair.new_step}"
        block = [BLOCK_LABELS[pair.block], _ms(pair.base_block_ns), _ms(pair.new_block_ns)]
        rows.append((step, *block, _ms(pair.base_ns), _ms(pair.new_ns), _signed_ms(pair.new_ns - pair.base_ns)))
    headings = ("step", "mostly in", "base", "new", "step: base", "new", "difference")
    return ComparisonTable("steps", "Steps that differ most, in milliseconds", headings, tuple(rows), words=2)


def _cells(found: Comparison, change: TimeDifference) -> tuple[str, ...]:
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
