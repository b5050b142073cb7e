"""Where the order of collectives differs first, in each process group.

Each rank is compared with the one whose log goes furthest. Their running hashes are equal up to an entry if and only if
all entries up to there agree, so bisection finds the first one that does not, at the cost of a few reads. Batches and
names are compared as far as the hashes agree:

- *Batches* may be numbered differently by each rank, so what counts is their difference. Only one that does not come
  back is a skipped batch: a rank that looks at other data for a while, such as a validation set, comes back. Where a
  rank begins its data anew, as with epochs of another length than the others', nothing is compared. In a group without
  buckets it is steps that are compared like this: those of buckets are in the hash.
- *Names* may differ because ranks call a tensor differently. They are swapped if what one rank has here, the other one
  has near by, where the first has something else, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.diagnosis.evidence import Divergence, Entry, GroupOrder
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.diagnosis.recorded_order import RecordedOrder
from overlapscope.trace.group_log import SHADOW, UNEVEN_INPUTS, UNKNOWN, Entries

AROUND: Final = 6
"""Entries of a window before and after the first difference."""

_NEAR: Final = 6
"""How far names that are swapped may be apart."""
_LONGEST_WINDOW: Final = 64
_END_ENTRIES: Final = 64
_LASTING: Final = 3
"""So many entries have to be a step apart, where a single one may just lie at the border of two steps."""
_SEVERITY: Final[tuple[Divergence | None, ...]] = ("signature", "step", "batch", "names", None)


@dataclass(frozen=True)
class Difference:
    """The first difference of two ranks."""

    number: int
    kind: Divergence | None
    """None: it lies before what is left, and what is left does not say what it was."""
    is_since_before: bool = False


def orders_of(source: RecordedOrder) -> tuple[GroupOrder, ...]:
    """The order in each group of collectives."""
    return tuple(order_in(source, group) for group in source.groups() if not group.is_point_to_point)


def conversations_of(source: RecordedOrder) -> tuple[GroupOrder, ...]:
    """Sends and receives: only the newest, because each rank numbers its own."""
    return tuple(_order(source, group, None) for group in source.groups() if group.is_point_to_point)


def order_in(source: RecordedOrder, group: ProcessGroup) -> GroupOrder:
    """The order in one group."""
    ranks = source.recorded(group)
    if not ranks:
        return _order(source, group, None)
    reference = max(ranks, key=lambda rank: (source.newest(group, rank), -rank))
    found = [
        difference
        for rank in ranks
        if rank != reference and (difference := difference_of(source, group, reference, rank)) is not None
    ]
    return _order(source, group, min(found, key=lambda one: (one.number, _SEVERITY.index(one.kind)), default=None))


def difference_of(source: RecordedOrder, group: ProcessGroup, a: int, b: int) -> Difference | None:
    """Where two ranks differ first, as far as both have come and have kept their entries."""
    pair = _Pair(source, group, a, b)
    if pair.first > pair.last:
        return None
    in_hash = pair.first_in_hash()
    end = in_hash.number - 1 if in_hash else pair.last
    found = [in_hash]
    if not (in_hash and in_hash.is_since_before):
        found += [pair.first_in_position(end), pair.first_in_names(end)]
    return min((one for one in found if one), key=lambda one: (one.number, _SEVERITY.index(one.kind)), default=None)


class _Pair:
    """Two ranks of a group, and the range of entries that both have."""

    def __init__(self, source: RecordedOrder, group: ProcessGroup, a: int, b: int) -> None:
        self.source, self.group, self.a, self.b = source, group, a, b
        self.first = max(source.oldest(group, a), source.oldest(group, b))
        self.last = min(source.newest(group, a), source.newest(group, b))

    def first_in_hash(self) -> Difference | None:
        low, high = self.first - 1, self.last + 1
        newest = self._nearest_to(self.last, low, high)
        if newest is None or self._agree_at(newest):
            return None
        high = newest
        # They agree at low, before which there is nothing, and not at high.
        while (middle := self._nearest_to((low + high) // 2, low, high)) is not None:
            low, high = (middle, high) if self._agree_at(middle) else (low, middle)
        if low < self.first and self.first > 1:
            return Difference(high, self._kind_since(high), is_since_before=True)
        return Difference(high, self._kind_at(high))

    def first_in_position(self, end: int) -> Difference | None:
        """Where one rank has gone on in its data, or without buckets in its steps, and the other has not."""
        ends = (self.first, min(end, self.first + _END_ENTRIES)), (max(self.first, end - _END_ENTRIES), end)
        has_buckets = any(self.source.table(self.a).is_bucket(self._both(*one)[0]).any() for one in ends)
        (early, early_offset), (late, late_offset) = (self._offsets(*one, has_buckets=has_buckets) for one in ends)
        if len(early) and len(late) and early_offset[0] == late_offset[-1]:
            return None
        number, offset = self._offsets(self.first, end, has_buckets=has_buckets, over_epochs=True)
        if not len(number) or offset[0] == offset[-1]:
            return None
        changed = int(np.flatnonzero(offset == offset[0])[-1]) + 1
        if has_buckets:
            return Difference(int(number[changed]), "batch")
        return Difference(int(number[changed]), "step") if len(number) - changed >= _LASTING else None

    def first_in_names(self, end: int) -> Difference | None:
        if self.first > end or self._names_agree(end):
            return None
        a, b = self._both(self.first, end)
        table_a, table_b = self.source.table(self.a), self.source.table(self.b)
        names_a, names_b, hashes = table_a.names(a), table_b.names(b), table_a.hashes(a)
        is_swapped = _turns_up(names_a, names_b, hashes) & _turns_up(names_b, names_a, hashes) & (names_a != names_b)
        (places,) = np.nonzero(is_swapped)
        return Difference(int(a["number"][places[0]]), "names") if len(places) else None

    def _nearest_to(self, number: int, low: int, high: int) -> int | None:
        """An entry that both have kept whole, between ``low`` and ``high`` without these: usually ``number`` itself."""
        for one in chain(range(number, low, -1), range(number + 1, high)):
            if all(len(self.source.columns(self.group, rank, one, one)) for rank in (self.a, self.b)):
                return one
        return None

    def _agree_at(self, number: int) -> bool:
        a, b = (self.source.columns(self.group, rank, number, number) for rank in (self.a, self.b))
        return bool(a["hash"][0] == b["hash"][0])

    def _kind_at(self, number: int) -> Divergence:
        a, b = (self.source.columns(self.group, rank, number, number) for rank in (self.a, self.b))
        hash_a, hash_b = self.source.table(self.a).hashes(a)[0], self.source.table(self.b).hashes(b)[0]
        return "step" if hash_a == hash_b != 0 and a["step"][0] != b["step"][0] else "signature"

    def _kind_since(self, number: int) -> Divergence | None:
        """The kind of the first difference in what is left, when there was one before."""
        a, b = self._both(number, self.last)
        differs = np.diff(a["hash"]) != np.diff(b["hash"])
        hash_a, hash_b = self.source.table(self.a).hashes(a), self.source.table(self.b).hashes(b)
        if len(a) and hash_a[0] != hash_b[0]:
            return "signature"
        (places,) = np.nonzero(differs)
        return self._kind_at(int(a["number"][places[0] + 1])) if len(places) else None

    def _names_agree(self, end: int) -> bool:
        a, b = ([self.source.columns(self.group, rank, n, n) for n in (self.first, end)] for rank in (self.a, self.b))
        if not all(len(rows) for rows in (*a, *b)):
            return False
        first = self.source.table(self.a).names(a[0])[0] == self.source.table(self.b).names(b[0])[0]
        since = [(rows[1]["names_hash"] - rows[0]["names_hash"])[0] for rows in (a, b)]
        return bool(first and since[0] == since[1])

    def _offsets(
        self, first: int, last: int, *, has_buckets: bool, over_epochs: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers of entries of which both know the batch, or the step, and by how much the second is ahead there.

        Args:
            over_epochs: from the first entry on, without what is lost or gained where a rank begins its data anew.
        """
        a, b = self._both(first, last)
        is_known = ((a["flags"] | b["flags"]) & (UNEVEN_INPUTS | SHADOW)) == 0
        position = "step"
        if has_buckets:
            position = "batch"
            is_known &= (a["batch"] != UNKNOWN) & (b["batch"] != UNKNOWN) & self.source.table(self.a).is_bucket(a)
        a, b = a[is_known], b[is_known]
        ahead = b[position].astype(np.int64) - a[position]
        if over_epochs and len(ahead):
            begins_anew = (np.diff(a[position].astype(np.int64)) < 0) | (np.diff(b[position].astype(np.int64)) < 0)
            ahead = ahead[0] + np.concatenate([[0], np.cumsum(np.where(begins_anew, 0, np.diff(ahead)))])
        return a["number"].astype(np.int64), ahead

    def _both(self, first: int, last: int) -> tuple[Entries, Entries]:
        """The entries in a range that both have."""
        a, b = (self.source.columns(self.group, rank, first, last) for rank in (self.a, self.b))
        if len(a) != len(b) or (a["number"] != b["number"]).any():
            _, in_a, in_b = np.intersect1d(a["number"], b["number"], return_indices=True)
            a, b = a[in_a], b[in_b]
        return a, b


def _turns_up(
    mine: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Where a name of mine is theirs near by, for a collective of the same kind, in a place where I have another."""
    found = np.zeros(len(mine), dtype=bool)
    for distance in range(1, min(_NEAR, len(mine) - 1) + 1):
        before, after = slice(None, -distance), slice(distance, None)
        for here, there in ((before, after), (after, before)):
            found[here] |= (mine[here] == theirs[there]) & (mine[there] != mine[here]) & (hashes[here] == hashes[there])
    return found & (mine != 0)


def _order(source: RecordedOrder, group: ProcessGroup, difference: Difference | None) -> GroupOrder:
    newest = {rank: source.newest(group, rank) for rank in source.recorded(group)}
    windows: dict[int, tuple[Entry, ...]] = {}
    for rank, its_newest in newest.items():
        if difference:
            first, last = difference.number - AROUND, difference.number + AROUND
        else:
            # From before the first entry that some rank has not come to.
            last = its_newest
            first = max(min(newest.values()) - AROUND, its_newest - _LONGEST_WINDOW)
        windows[rank] = source.entries(group, rank, first, last)
    return GroupOrder(
        name=group.name,
        ranks=group.ranks,
        description=group.description,
        backend=group.backend,
        newest=newest,
        first_divergence=difference.number if difference else None,
        divergence=difference.kind if difference else None,
        is_since_before=difference.is_since_before if difference else False,
        windows=windows,
    )
