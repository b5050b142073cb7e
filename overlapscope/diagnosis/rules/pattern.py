"""How two sequences of collectives go on after their first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from overlapscope.diagnosis.evidence import Entry

_MOST_MISSING: Final = 4


@dataclass(frozen=True)
class Pattern:
    """What explains the difference."""

    kind: Literal["replaced", "missing", "swapped"]
    missing_on: Literal["first", "second"] | None = None
    """Of the two sequences, the one that lacks entries."""
    count: int = 0
    """How many it lacks."""


def pattern_of(first: Sequence[Entry], second: Sequence[Entry]) -> Pattern:
    """What explains how two sequences go on, each from its first differing entry on.

    They are replaced if the entries after the first are the same again or nothing tells otherwise.
    """
    a = [entry.signature.hash for entry in first]
    b = [entry.signature.hash for entry in second]
    if _agree(a[1:], b[1:]):
        return Pattern("replaced")
    if len(a) > 1 and len(b) > 1 and (a[0], a[1]) == (b[1], b[0]) and a[2:3] == b[2:3][: len(a[2:3])]:
        return Pattern("swapped")
    found = []
    for count in range(1, _MOST_MISSING + 1):
        found += [(_agree(a[count:], b), -count, Pattern("missing", "second", count))]
        found += [(_agree(a, b[count:]), -count, Pattern("missing", "first", count))]
    agreeing, _, best = max(found, key=lambda one: one[:2])
    return best if agreeing else Pattern("replaced")


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """How many entries agree, if all do that both have; else 0."""
    both = list(zip(a, b, strict=False))
    return len(both) if all(x == y for x, y in both) else 0
