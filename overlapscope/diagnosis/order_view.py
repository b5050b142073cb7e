"""Lanes for plotting the order of collectives: one row per rank, one column per number, and the cells that differ.

Ranks match collectives by their number alone, so lanes are aligned by it: one column is what ranks reduced with each
other. If there are many, ranks with identical histories share a lane. Only the visible window is ever read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, get_args

from overlapscope.diagnosis.collective_order import OrderSource, RunningHashes
from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Divergence, Entry
from overlapscope.diagnosis.text import format_device_progress
from overlapscope.text import format_bytes, format_ns
from overlapscope.trace.collective_log import SHADOW, UNEVEN_INPUTS, ProcessGroup, Signature, hashed_step

# Side-by-side comparison of the collectives that the ranks of a group have at one number.

_FLAG_TEXTS: Final = {
    UNEVEN_INPUTS: "inside join() or after it",
    SHADOW: "by a rank that has joined, in place of another's",
}


@dataclass(frozen=True, kw_only=True)
class OrderSide:
    """Ranks with the same collective at a number, launched by the same line, whose devices are at the same point."""

    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    """One entry per rank; none if they have nothing there."""

    @property
    def entry(self) -> Entry | None:
        """Return the entry that represents the side."""
        return self.entries[0] if self.entries else None


@dataclass(frozen=True, kw_only=True)
class ComparisonLine:
    """One line of the comparison: its name, and its value on each side."""

    label: str
    values: tuple[str, ...]
    differs: bool


def group_into_sides(entries: Mapping[int, Entry | None]) -> tuple[OrderSide, ...]:
    """Group ranks into sides, the largest first, and last the ranks that have nothing there.

    Args:
        entries: entry of each rank.
    """
    same: dict[Hashable, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        what = entry and (
            entry.signature.hash,
            entry.signature.names,
            entry.step,
            entry.call_site,
            format_device_progress(entry),
        )
        same.setdefault(what, []).append(rank)
    largest_first = sorted(same.items(), key=lambda item: (item[0] is None, -len(item[1])))
    return tuple(
        OrderSide(ranks=tuple(ranks), entries=tuple(entry for rank in ranks if (entry := entries[rank]) is not None))
        for _, ranks in largest_first
    )


_TRAITS: Final[tuple[tuple[str, Callable[[Entry], str]], ...]] = (
    ("call site", lambda entry: str(entry.call_site or "unknown")),
    ("operation", lambda entry: _operation(entry.signature)),
    ("elements", lambda entry: f"{entry.signature.elements:,}" if entry.signature.elements else ""),
    ("type", lambda entry: entry.signature.dtype),
    ("shapes", lambda entry: _shapes(entry.signature.shapes)),
    ("size", lambda entry: format_bytes(entry.signature.bytes) if entry.signature.bytes else ""),
    ("root or peer", lambda entry: "" if entry.signature.peer is None else f"rank {entry.signature.peer}"),
    ("tensors", lambda entry: _listed(entry.signature.names)),
    ("launched by", lambda entry: _launcher(entry)),
    ("step", lambda entry: "" if entry.step == UNKNOWN_STEP else str(entry.loop_step)),
    ("batch", lambda entry: "" if entry.batch is None else str(entry.batch)),
    ("phase", lambda entry: (entry.phase or "").replace("_", " ")),
    ("note", lambda entry: ", ".join(_notes(entry))),
)


def _notes(entry: Entry) -> Iterator[str]:
    yield from (text for flag, text in _FLAG_TEXTS.items() if entry.flags & flag)
    if where := format_device_progress(entry):
        yield where


def compare_sides(sides: Sequence[OrderSide], offsets_ns: Mapping[int, float]) -> tuple[ComparisonLine, ...]:
    """Return the lines of the comparison: call site, what differs, what does not; lines without values are omitted.

    Args:
        offsets_ns: added to each rank's times to make them comparable; ranks without one are left out.
    """
    traits = []
    for label, text in _TRAITS:
        values = tuple("" if side.entry is None else text(side.entry) for side in sides)
        of_entries = {value for value, side in zip(values, sides, strict=True) if side.entry is not None}
        traits.append(ComparisonLine(label=label, values=values, differs=len(of_entries) > 1))
    given = [trait for trait in traits if any(trait.values)]
    by_interest = sorted(given, key=lambda trait: (trait.label != "call site", not trait.differs))
    return (*by_interest, *_times(sides, offsets_ns))


def _times(sides: Sequence[OrderSide], offsets_ns: Mapping[int, float]) -> list[ComparisonLine]:
    """Return when each side announced, launched and ended it, relative to the first announcement."""
    announced = [time_ns for side in sides for time_ns in _moments(side, "announced", offsets_ns) if time_ns]
    if not announced:
        return []
    begin_ns = min(announced)
    has_failed = any(entry.state == "failed" for side in sides for entry in side.entries)
    return [
        ComparisonLine(
            label="ended" if state == "completed" and has_failed else state,
            values=tuple(_span(_moments(side, state, offsets_ns), begin_ns) if side.entries else "" for side in sides),
            differs=False,
        )
        for state in ("announced", "launched", "completed")
    ]


def _moments(side: OrderSide, state: str, offsets_ns: Mapping[int, float]) -> list[float | None]:
    """Return when the ranks of a side came to a state; None for never, and nothing of those on another clock."""
    pairs = [(offsets_ns.get(rank), entry) for rank, entry in zip(side.ranks, side.entries, strict=False)]
    times_ns = [(offset_ns, getattr(entry, f"{state}_ns")) for offset_ns, entry in pairs if offset_ns is not None]
    return [None if time_ns is None else time_ns + offset_ns for offset_ns, time_ns in times_ns]


def _span(times_ns: Sequence[float | None], begin_ns: float) -> str:
    known = sorted(time_ns - begin_ns for time_ns in times_ns if time_ns is not None)
    if not times_ns:
        return "clock unknown"
    if not known:
        return "never"
    never = f", {len(times_ns) - len(known)} never" if len(known) < len(times_ns) else ""
    first, last = (f"+{format_ns(time_ns)}" if time_ns else "+0" for time_ns in (known[0], known[-1]))
    return (first if first == last else f"{first} to {last}") + never


def _operation(signature: Signature) -> str:
    return f"{signature.op} ({signature.reduce_op})" if signature.reduce_op else signature.op


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return _listed(["×".join(map(str, shape)) or "scalar" for shape in shapes])


def _listed(texts: Sequence[str], most: int = 6) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


_LAUNCHERS: Final = {
    "bucket": "DDP, gradients",
    "buffers": "DDP, buffers",
    "bitmap": "DDP, which parameters were used",
    "construction": "DDP, at construction",
    "join": "join()",
    "hook": "a communication hook",
    "user": "your code",
}


def _launcher(entry: Entry) -> str:
    signature = entry.signature
    if signature.role == "user" and entry.step == UNKNOWN_STEP:
        return ""  # dumps of another tool don't say who launched it
    who = _LAUNCHERS.get(signature.role, signature.role)
    return f"{who}: bucket {signature.bucket}" if signature.role == "bucket" else who


# Categories of collectives for coloring: buckets, other collectives of DDP, and the user's own by operation.

BUCKET_SLOTS: Final = 8
"""Number of colors that buckets cycle through, as on the timeline."""

_OF_DDP: Final = ("buffers", "bitmap", "construction", "join", "hook")
_OF_USER: Final = ("all_reduce", "broadcast", "gather", "scatter", "reduce", "barrier", "other")
CATEGORIES: Final = (*(f"bucket_{slot}" for slot in range(BUCKET_SLOTS)), *_OF_DDP, *_OF_USER)
"""Names of the categories, by number."""

_FAMILIES: Final = {
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "scatter",
    "monitored_barrier": "barrier",
}


def collective_category(signature: Signature) -> int:
    """Return the number of a collective's category."""
    if signature.role == "bucket":
        return max(0, signature.bucket) % BUCKET_SLOTS
    if signature.role in _OF_DDP:
        return CATEGORIES.index(signature.role)
    family = _FAMILIES.get(signature.op, signature.op)
    return CATEGORIES.index(family if family in _OF_USER else "other")


_Traits = tuple[Hashable, ...]
"""Compared properties of an entry, in the order of ``DIVERGENCES``."""

_COMPARED_FOLDS: Final = 64
"""Maximum number of distinct histories, the most frequent ones, that determine the majority."""

_MOST_FOLDS: Final = 16
"""Number of lanes above which ranks share one although the progress of their latest collectives differs."""

_SEARCHED_AT_ONCE: Final = 512
_NEWEST_LOOKED_AT: Final = 16
_LOOKED_BACK: Final = 64

DIVERGENCES: Final[tuple[Divergence, ...]] = get_args(Divergence)
"""Properties of an entry that may differ from other ranks; the first that differs is reported."""


@dataclass(frozen=True, kw_only=True)
class OrderLane:
    """One row: a rank, or ranks with identical histories."""

    ranks: tuple[int, ...]
    """Ranks of the lane; the entries of the first one are read."""
    latest: int = 0
    """Number of the latest entry; 0 if the ranks left none."""
    is_blamed: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The content of a lane at a number."""

    lane: int
    number: int
    entry: Entry | None
    """The entry; None if the ranks have nothing there while others do."""
    difference: Divergence | None = None
    """Difference from the majority; without a majority, all ranks differ."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The cells of a range of numbers."""

    first: int
    last: int
    cells: tuple[Cell, ...]
    steps: tuple[tuple[int, int], ...]
    """(number, step) where a step begins, on most ranks."""


class OrderLanes:
    """The lanes of one process group.

    Args:
        first_divergence: number of the first entry that is not the same on all ranks, if there is one.
        divergence: kind of that difference. Different names or batches of data are no fault as such, so cells differ by
            them only if that is what was found.
        blamed: ranks that the verdict names; they are always shown, and never share a lane.
    """

    def __init__(
        self,
        source: OrderSource,
        group: ProcessGroup,
        *,
        first_divergence: int | None = None,
        divergence: Divergence | None = None,
        blamed: Iterable[int] = (),
    ) -> None:
        self._source = source
        self.group = group
        self._first_divergence = first_divergence
        self._divergence = divergence
        self.blamed = frozenset(blamed)
        self._newest = {rank: source.latest(group, rank) for rank in source.recorded(group)}
        self._oldest = {rank: source.oldest(group, rank) for rank in self._newest}
        self.latest = max(self._newest.values(), default=0)
        """Highest number that any rank has."""
        self.oldest = min(self._oldest.values(), default=1)
        """Lowest number that any rank still has."""
        shortest = min(self._newest.values(), default=0)
        candidates = [first_divergence, shortest + 1 if shortest < self.latest else None]
        self.first_difference = min((number for number in candidates if number is not None), default=None)
        """First number at which ranks differ, or some have nothing while others do."""

    @cached_property
    def folds(self) -> tuple[OrderLane, ...]:
        """Return lanes of ranks with identical histories, by their first rank; each blamed rank has its own lane."""
        histories = {rank: self._history(rank) for rank in self.group.ranks}
        folds = self._fold(histories)
        if len(folds) > _MOST_FOLDS:
            # In a run that was ended from outside, every rank was at another point of its latest few collectives.
            folds = self._fold({rank: history[:-1] for rank, history in histories.items()})
        return folds

    def lanes_of(self, ranks: Iterable[int]) -> tuple[OrderLane, ...]:
        """Return a lane for each of these ranks, and for the blamed ones."""
        return tuple(self._lane(rank) for rank in dict.fromkeys([*ranks, *sorted(self.blamed & {*self.group.ranks})]))

    def window(self, lanes: Sequence[OrderLane], first: int, last: int) -> Window:
        """Return the cells of the numbers ``first`` to ``last``.

        The majority at a number is determined from all ranks, whether or not they are shown.
        """
        first, last = max(first, self.oldest), min(last, self.latest)
        columns = self._columns(first, last)
        cells = []
        for lane_index, lane in enumerate(lanes):
            rank = lane.ranks[0]
            entries = {entry.number: entry for entry in self._entries(rank, first, last)}
            for number in range(first, last + 1):
                entry = entries.get(number)
                if entry is not None:
                    difference = _difference(self._traits(rank, entry), columns[number])
                    cells.append(Cell(lane=lane_index, number=number, entry=entry, difference=difference))
                elif number > lane.latest:
                    cells.append(Cell(lane=lane_index, number=number, entry=None))
        return Window(first=first, last=last, cells=tuple(cells), steps=self._steps(first, last))

    def entries_at(self, number: int) -> dict[int, Entry | None]:
        """Return the entry of each rank that left a log; None if its log ends earlier, or the entry is overwritten."""
        return {rank: next(iter(self._entries(rank, number, number)), None) for rank in self._newest}

    def start_of_step(self, step: int) -> int:
        """Return the number of the first entry of this or a later step, on the rank furthest ahead; else its last."""
        rank = self._furthest
        if rank is None:
            return 1
        low, high = self._oldest[rank], self._newest[rank]
        # Steps never decrease, so bisection works.
        while low < high:
            middle = (low + high) // 2
            found = self._entries(rank, middle, middle)
            low, high = (low, middle) if found and found[0].loop_step >= step else (middle + 1, high)
        return low

    def next_difference(self, number: int, direction: Literal[1, -1]) -> int | None:
        """Return the next or previous number at which ranks differ or some have nothing; None if there is none."""
        lowest = self.first_difference
        if lowest is None:
            return None
        at = max(number + 1, lowest) if direction == 1 else min(number - 1, self.latest)
        while lowest <= at <= self.latest:
            first, last = sorted((at, at + direction * (_SEARCHED_AT_ONCE - 1)))
            found = self._differing(max(first, lowest), min(last, self.latest))
            if found:
                return found[0] if direction == 1 else found[-1]
            at += direction * _SEARCHED_AT_ONCE
        return None

    def _differing(self, first: int, last: int) -> list[int]:
        shortest = min(self._newest.values())
        columns = self._columns(first, last)
        return [number for number, traits in columns.items() if number > shortest or len(traits) > 1]

    def _columns(self, first: int, last: int) -> dict[int, Counter[_Traits]]:
        """Count the ranks with each entry at each number."""
        columns: dict[int, Counter[_Traits]] = {number: Counter() for number in range(first, last + 1)}
        for fold in sorted(self.folds, key=lambda fold: -len(fold.ranks))[:_COMPARED_FOLDS]:
            for entry in self._entries(fold.ranks[0], first, last):
                columns[entry.number][self._traits(fold.ranks[0], entry)] += len(fold.ranks)
        return columns

    def _steps(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return where steps begin on the rank that got furthest."""
        if self._furthest is None:
            return ()
        entries = self._entries(self._furthest, first - 1, last)
        begins = [entry for before, entry in pairwise(entries) if before.loop_step != entry.loop_step]
        if entries and entries[0].number == self._oldest[self._furthest]:
            begins.insert(0, entries[0])
        return tuple((entry.number, entry.loop_step) for entry in begins if entry.step != UNKNOWN_STEP)

    def _traits(self, rank: int, entry: Entry) -> _Traits:
        signature = entry.signature
        return (
            signature.hash,
            hashed_step(signature, entry.step, entry.flags),
            self._batches_since(rank, entry) if self._divergence == "batch" else None,
            signature.names if self._divergence == "names" else None,
        )

    def _batches_since(self, rank: int, entry: Entry) -> int | None:
        """Return the batches since the last one before the divergence, as ranks may count from any number."""
        before = self._batch_before.get(rank)
        is_meant = entry.signature.is_gradient_reduction and entry.number >= (self._first_divergence or 1)
        return entry.batch - before if is_meant and before is not None and entry.batch is not None else None

    @cached_property
    def _batch_before(self) -> dict[int, int]:
        last = (self._first_divergence or 1) - 1
        batches = {}
        for rank in self._newest:
            for entry in self._entries(rank, last - _LOOKED_BACK + 1, last):
                if entry.signature.is_gradient_reduction and entry.batch is not None:
                    batches[rank] = entry.batch
        return batches

    def _fold(self, histories: dict[int, tuple[Hashable, ...]]) -> tuple[OrderLane, ...]:
        same: dict[Hashable, list[int]] = {}
        for rank, history in histories.items():
            same.setdefault((rank in self.blamed and rank, history), []).append(rank)
        return tuple(self._lane(*ranks) for ranks in same.values())

    def _history(self, rank: int) -> tuple[Hashable, ...]:
        """Return a key that two ranks share if their histories and the states of their latest entries are the same."""
        latest = self._newest.get(rank, 0)
        if not latest:
            return ()
        if isinstance(self._source, RunningHashes):
            # Reading entries would load the signatures of all ranks: thousands of lines in as many files.
            rows = self._source.columns(self.group, rank, latest - _NEWEST_LOOKED_AT + 1, latest)
            if not len(rows):
                return (latest,)
            progress = (rows["launched_ns"] > 0).astype(int) + (rows["completed_ns"] > 0)
            batches = int(rows["batch"][-1]) - self._batch_before.get(rank, 0) if self._divergence == "batch" else 0
            return latest, int(rows["hash"][-1]), int(rows["names_hash"][-1]), batches, tuple(progress.tolist())
        entries = self._entries(rank, self._oldest[rank], latest)
        states = tuple(entry.state for entry in entries[-_NEWEST_LOOKED_AT:])
        return latest, tuple(self._traits(rank, entry) for entry in entries), states

    def _lane(self, *ranks: int) -> OrderLane:
        latest = self._newest.get(ranks[0], 0)
        return OrderLane(ranks=ranks, latest=latest, is_blamed=not self.blamed.isdisjoint(ranks))

    @cached_property
    def _furthest(self) -> int | None:
        return max(self._newest, key=lambda rank: self._newest[rank], default=None)

    def _entries(self, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        if rank not in self._newest or last < first:
            return ()
        return self._source.entries(self.group, rank, max(1, first), last)


def _difference(traits: _Traits, column: Counter[_Traits]) -> Divergence | None:
    """Return the difference from the majority, or from any other rank if there is no majority."""
    ranked = column.most_common(2)
    if len(ranked) < 2 or (ranked[0][1] > ranked[1][1] and traits == ranked[0][0]):
        return None
    other = ranked[0][0] if traits != ranked[0][0] else ranked[1][0]
    return next((what for what, one, two in zip(DIVERGENCES, traits, other, strict=True) if one != two), None)
