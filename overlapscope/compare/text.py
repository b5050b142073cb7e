"""Sentences that describe a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.text import BLOCK_LABELS, REASON_LABELS, describe_excluded
from overlapscope.compare.changes import TRIMMED
from overlapscope.compare.comparison import Comparison, Outcome
from overlapscope.compare.side import STEP, ComparisonSide
from overlapscope.text import (
    capitalize,
    count_of,
    format_ns,
    format_ns_change,
    format_share,
    format_share_change,
    format_share_range,
)
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
    unlike = [f"Not the same job: {'; '.join(found.unlike)}."] * bool(found.unlike)
    return [*unlike, *(_sentence(found, part, fail_above) for part in parts)]


def _sentence(found: Comparison, part: str, fail_above: float) -> str:
    outcome = found.outcome(part, fail_above)
    what = "" if part == STEP else f"{PART_LABELS[part]}: "
    if outcome in ("no difference seen", "too noisy to tell"):
        return capitalize(f"{what}{_describe_nothing(found, part, outcome)}")
    word = "longer" if outcome.startswith("slower") else "shorter"
    if part == STEP:
        word = "slower" if word == "longer" else "faster"
    if outcome == "slower, but not surely enough":
        word += f", but not significantly by more than {100 * fail_above:g} %"
    if part != STEP:
        return capitalize(f"{what}{word}, {_numbers(found, part)}.")
    return capitalize(f"{word}: {_numbers(found, part)}.{_describe_blocks(found)}")


def _describe_nothing(found: Comparison, part: str, outcome: Outcome) -> str:
    """Describe a difference that may be chance: how large it may be, and which blocks differ all the same."""
    seen_ns = found.changes[part].seen_ns
    shows = f"this many steps would show one of {format_share(found.share(seen_ns))}{_of(part)} or more"
    if math.isnan(seen_ns):
        shows = "there are too few steps for an interval"
    blocks = _describe_blocks(found) if part == STEP else ""
    if outcome == "too noisy to tell":
        return f"can't tell: {_numbers(found, part)}; {shows}.{blocks}"
    return f"no significant difference: {_numbers(found, part)}; {shows}.{blocks}"


def _numbers(found: Comparison, part: str) -> str:
    """Format both sides and the difference, and also that of the mean if the trimmed mean is shown."""
    change = found.changes[part]
    shown = change.most_significant
    bounds = format_share_range(shown.ns.times(1 / found.step.mean.base))
    text = (
        f"{format_ns(shown.base)} → {format_ns(shown.new)}, "
        f"{format_share_change(found.share(shown.ns.value))}{_of(part)} "
        f"(99 % interval {bounds})"
    )
    if shown is change.mean:
        return text
    mean = format_share_change(found.share(change.mean.ns.value))
    chance = "" if change.mean.is_significant else ", which could be chance"
    return f"{text} in the middle {MIDDLE} of the steps; {mean} in the mean of all{chance}"


def _describe_blocks(found: Comparison) -> str:
    """Name the blocks that differ beyond noise, the largest first: what a gain was paid with is among them.

    The difference is that of the mean, as in tables, if it is significant.
    """
    sure: list[tuple[float, str]] = []
    for name in BLOCKS:
        change = found.changes[name]
        if change.most_significant.is_significant:
            in_mean = change.mean.is_significant
            time_ns = (change.mean if in_mean else change.middle).ns.value
            where = "" if in_mean else f" in the middle {MIDDLE} of steps"
            sure.append((abs(time_ns), f"{BLOCK_LABELS[name]} ({format_ns_change(time_ns)}{where})"))
    named = [text for _, text in sorted(sure, reverse=True)[:_MAX_NAMED]]
    if named:
        return f" Blocks that differ: {', '.join(named)}."
    return " No single block differs beyond noise." if found.step.most_significant.is_significant else ""


def _of(part: str) -> str:
    return "" if part == STEP else " of the step"


def describe_sides(found: Comparison) -> Iterator[str]:
    """Yield what is compared, a line each."""
    for label, side in (("Base", found.base), ("New", found.new)):
        yield f"{label}: {side.name}: {_side(side)}"


def _side(side: ComparisonSide) -> str:
    steady = side.summary.steady
    facts = [describe_models(side.trace.run) or "unknown model"]
    facts.append(f"means of {count_of(len(side.steps), 'step')} of {count_of(side.summary.ranks, 'rank')}")
    if steady.excluded:
        facts.append(f"excluded: {describe_excluded(steady.excluded)}")
    return ", ".join(facts)
