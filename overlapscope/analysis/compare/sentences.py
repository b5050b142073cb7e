"""Sentences and labels of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.wording import BLOCK_LABELS, REASON_LABELS
from overlapscope.analysis.compare.changes import TRIMMED
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.side import STEP
from overlapscope.units import format_ns

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
