"""Problems with the files of a recording, as people read them: what is so of many ranks is one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from overlapscope.errors import Problem
from overlapscope.text import rank_list

_OF_RANK: Final = re.compile(r"(?P<folder>.+)/rank_(?P<rank>\d+)(?P<file>/[^:]+)?: (?P<what>.+)", re.DOTALL)
_NUMBER: Final = re.compile(r"(\b\d+(?:,\d{3})*(?:\.\d+)?\b)")


def merge_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Merge problems that differ only in the rank and in numbers, which become ranges; each stays where it came first.

    Example: ``run/rank_0/events.bin: 3 records missing`` and ``run/rank_1/events.bin: 12 records missing`` become
    ``run: ranks 0, 1: events.bin: 3 to 12 records missing``.
    """
    merged: dict[object, list[tuple[Problem, re.Match[str] | None]]] = {}
    known: Counter[object] = Counter()
    for problem in dict.fromkeys(problems):
        found = _OF_RANK.fullmatch(problem.message)
        key: object = problem
        if found:
            alike = (problem.severity, found["folder"], found["file"], _NUMBER.sub("0", found["what"]))
            key = (alike, known[alike, found["rank"]])  # never two of one rank
            known[alike, found["rank"]] += 1
        merged.setdefault(key, []).append((problem, found))
    return [_merge(*zip(*each, strict=True)) for each in merged.values()]


def _merge(problems: Sequence[Problem], matches: Sequence[re.Match[str]]) -> Problem:
    if len(problems) == 1:
        return problems[0]
    file = (matches[0]["file"] or "").removeprefix("/")
    parts = (matches[0]["folder"], rank_list(int(found["rank"]) for found in matches), file)
    what = _span_numbers([found["what"] for found in matches])
    return Problem(problems[0].severity, ": ".join(filter(None, [*parts, what])))


def _span_numbers(texts: Sequence[str]) -> str:
    """Return texts that differ only in numbers as one, with a range where these differ."""
    parts = zip(*map(_NUMBER.split, texts), strict=True)
    return "".join(each[0] if len(set(each)) == 1 else _span(each) for each in parts)


def _span(numbers: Sequence[str]) -> str:
    low, *_, high = sorted(set(numbers), key=lambda text: float(text.replace(",", "")))
    return f"{low} to {high}"
