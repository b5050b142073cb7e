"""Alignment of two sequences of collectives after their first difference: replaced, missing or swapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from overlapscope.diagnosis.evidence import Entry

_MOST_MISSING: Final = 4


@dataclass(frozen=True)
class Continuation:
    """The explanation of a difference."""

    kind: Literal["replaced", "missing", "swapped"]
    missing_on: Literal["first", "second"] | None = None
    """The sequence that lacks entries."""
    count: int = 0
    """Number of entries it lacks."""


def explain_continuation(first: Sequence[Entry], second: Sequence[Entry]) -> Continuation:
    """Explain how two sequences continue, each from its first differing entry on.

    The kind is "replaced" if the entries after the first are equal again, or nothing else fits. Example: a b c and x b
    c are replaced; a b c and b a c are swapped; a b c d and b c d have one missing on the second.
    """
    a = [entry.signature.hash for entry in first]
    b = [entry.signature.hash for entry in second]
    if _agree(a[1:], b[1:]):
        return Continuation("replaced")
    if len(a) > 1 and len(b) > 1 and (a[0], a[1]) == (b[1], b[0]) and a[2:3] == b[2:3][: len(a[2:3])]:
        return Continuation("swapped")
    found = []
    for count in range(1, _MOST_MISSING + 1):
        found += [(_agree(a[count:], b), -count, Continuation("missing", "second", count))]
        found += [(_agree(a, b[count:]), -count, Continuation("missing", "first", count))]
    agreeing, _, best = max(found, key=lambda one: one[:2])
    return best if agreeing else Continuation("replaced")


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix if one is a prefix of the other; else 0."""
    both = list(zip(a, b, strict=False))
    return len(both) if all(x == y for x, y in both) else 0
