"""Readings of machine facts by source: what a counter counted and how long a level held, in any spans of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.trace.machine_log import MachineReading, MachineSource

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

Spans = npt.NDArray[np.int64]
"""Begins and ends of spans of time, shape (2, n)."""

_POINTS: Final = 200
"""Number of moments at which levels are looked up."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Amounts:
    """Amounts in adjacent pieces of time, each spread evenly over its piece."""

    begin_ns: Int64s
    end_ns: Int64s
    amount: Floats

    def within(self, spans: Spans) -> Floats:
        """Return the amount in each of some spans."""
        if not len(self.amount) or not spans.size:
            return np.zeros(spans.shape[1])
        edges = np.concatenate([self.begin_ns, self.end_ns])
        sums = np.cumsum(self.amount)
        total = np.concatenate([sums - self.amount, sums])
        order = np.argsort(edges, kind="stable")
        since, total = edges[order[0]], total[order]
        known = (edges[order] - since).astype(np.float64)
        begin, end = (np.interp((times - since).astype(np.float64), known, total) for times in spans)
        found: Floats = end - begin
        return found


class SourceReadings:
    """Readings of one source, by whichever ranks sampled it.

    Args:
        rows: in any order.
    """

    def __init__(self, name: str, rows: Iterable[MachineReading]) -> None:
        self.name = name
        by_fact: dict[str, list[MachineReading]] = {}
        times = []
        for row in sorted(rows):
            by_fact.setdefault(row.name, []).append(row)
            times.append(row.time_ns)
        self._by_fact = by_fact
        self.begin_ns, self.end_ns = (times[0], times[-1]) if times else (0, 0)

    def has(self, *facts: str) -> bool:
        """Return whether all of these facts were read."""
        return all(fact in self._by_fact for fact in facts)

    def clip(self, spans: Spans) -> Spans:
        """Return the parts of spans in which the source was sampled."""
        clipped = np.clip(spans, self.begin_ns, self.end_ns)
        found: Spans = clipped[:, clipped[0] < clipped[1]]
        return found

    def counted(self, fact: str) -> Amounts:
        """Return what a counter has counted from reading to reading."""
        rows = self._by_fact.get(fact, [])
        values = np.array([row.value for row in rows])
        steps = np.diff(values)
        steps = np.where(steps < 0, values[1:], steps)  # it began anew
        earlier = np.array([row.time_ns for row in rows], dtype=np.int64)
        since = np.array([row.since_ns for row in rows], dtype=np.int64)
        is_first = since >= earlier  # of a rank that has begun to sample: all since the one before it
        begin = np.where(is_first[1:], earlier[:-1], np.maximum(since[1:], earlier[:-1]))
        return Amounts(begin_ns=begin, end_ns=earlier[1:], amount=steps)

    def held(self, is_so: Callable[..., npt.NDArray[np.bool_]], *facts: str) -> Amounts:
        """Return for how long some levels were such that a condition held.

        Args:
            is_so: the condition; takes the values of the facts.
        """
        times = [row.time_ns for fact in facts for row in self._by_fact.get(fact, ())]
        edges = np.unique(np.array([*times, self.end_ns], dtype=np.int64))
        begin, end = edges[:-1], edges[1:]
        amount = (end - begin) * is_so(*(self.level_at(fact, begin) for fact in facts))
        return Amounts(begin_ns=begin, end_ns=end, amount=amount.astype(np.float64))

    def happened(self, fact: str) -> Amounts:
        """Return the events of a name, as amounts at a time."""
        at = np.array([row.time_ns for row in self._by_fact.get(fact, ())], dtype=np.int64)
        return Amounts(begin_ns=at - 1, end_ns=at, amount=np.ones(len(at)))

    def level_at(self, fact: str, times_ns: Int64s) -> Floats:
        """Return a level at some times: the latest reading; before the first one, the first; NaN if there is none."""
        rows = self._by_fact.get(fact, [])
        if not rows:
            return np.full(len(times_ns), np.nan)
        at = np.array([row.time_ns for row in rows], dtype=np.int64)
        values = np.array([row.value for row in rows])
        found: Floats = values[np.maximum(np.searchsorted(at, times_ns, side="right") - 1, 0)]
        return found

    def latest(self, fact: str) -> float | None:
        """Return the latest value of a fact; None if there is none."""
        rows = self._by_fact.get(fact)
        return rows[-1].value if rows else None


def moments_in(spans: Spans) -> Int64s:
    """Return moments that are spread evenly over spans of time."""
    lengths = spans[1] - spans[0]
    total = int(lengths.sum())
    if total <= 0:
        return np.empty(0, dtype=np.int64)
    ends = np.cumsum(lengths)
    at = ((np.arange(_POINTS) + 0.5) * total / _POINTS).astype(np.int64)
    piece = np.minimum(np.searchsorted(ends, at, side="right"), len(ends) - 1)
    found: Int64s = spans[0][piece] + at - (ends[piece] - lengths[piece])
    return found


def spans_of(*pairs: tuple[int, int]) -> Spans:
    """Return spans from pairs of begin and end."""
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def outside(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """Return what is between two times and in none of the spans."""
    order = np.argsort(spans[0], kind="stable")
    begins, ends = spans[0][order], np.maximum.accumulate(spans[1][order]) if spans.size else spans[1]
    found = np.stack([np.append(begin_ns, ends), np.append(begins, end_ns)])
    return found[:, found[0] < found[1]]


class MachineReadings:
    """Readings of all sources of a job.

    Args:
        rows: readings of all ranks.
        sources: the sources that each rank uses.
    """

    def __init__(self, rows: Iterable[MachineReading], sources: Mapping[int, Iterable[MachineSource]]) -> None:
        by_source: dict[str, list[MachineReading]] = {}
        for row in rows:
            by_source.setdefault(row.source, []).append(row)
        self.sources = {name: SourceReadings(name, found) for name, found in by_source.items()}
        self.uses: dict[int, tuple[str, ...]] = {}
        self.labels: dict[str, str] = {}
        self.unreadable: dict[tuple[str, str, str], list[int]] = {}
        """Ranks by kind of source, facts and reason."""
        for rank, found_sources in sources.items():
            used = [one for one in found_sources if not one.why]
            self.uses[rank] = tuple(dict.fromkeys(one.source for one in used))
            self.labels |= {one.source: one.label for one in used}
            for one in found_sources:
                if one.why:
                    self.unreadable.setdefault((one.source.partition(" ")[0], one.facts, one.why), []).append(rank)
