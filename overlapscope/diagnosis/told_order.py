"""The order of collectives as ranks have told it: a few entries of each, while the job runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from overlapscope.diagnosis.card import Card, LogExcerpt
from overlapscope.diagnosis.entries import entries_of
from overlapscope.diagnosis.evidence import Entry
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.trace.group_log import ENTRY_DTYPE, Entries
from overlapscope.trace.signature import Signature


class ToldOrder:
    """An ``OrderSource`` of cards.

    Args:
        cards: by rank.
        newest: how far ranks have come in a group by what they have said last, by rank and name of the group: their
            cards may be older.
    """

    def __init__(self, cards: Mapping[int, Card], newest: Mapping[int, Mapping[str, int]]) -> None:
        self._cards = cards
        self._excerpts: dict[ProcessGroup, dict[int, LogExcerpt]] = {}
        for rank, card in sorted(cards.items()):
            for one in card.logs:
                group = ProcessGroup(
                    name=one.name,
                    ranks=one.ranks,
                    is_point_to_point=one.is_point_to_point,
                    backend=one.backend,
                    description=one.description,
                )
                self._excerpts.setdefault(group, {})[rank] = one
        self._newest = {
            group: self._newest_in(group, excerpts, newest)
            for group, excerpts in sorted(
                self._excerpts.items(), key=lambda item: (item[0].is_point_to_point, item[0].name, item[0].ranks)
            )
        }

    def groups(self) -> tuple[ProcessGroup, ...]:
        """All groups in which anything was launched: collectives first, each in the order of their names."""
        return tuple(self._newest)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """The members of a group that have told how far they are, in order."""
        return tuple(self._newest[group])

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Number of the oldest entry that was told; one more than the newest if none was."""
        excerpt = self._excerpts[group].get(rank)
        return excerpt.rows[0][0] if excerpt and excerpt.rows else self.newest(group, rank) + 1

    def newest(self, group: ProcessGroup, rank: int) -> int:
        """Number of the newest entry, told or not; 0 if there is none."""
        return self._newest[group].get(rank, 0)

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """The entries with the numbers ``first`` to ``last``, as far as they were told, in order."""
        card = self._cards.get(rank)
        rows = self._rows(group, rank, first, last)
        return entries_of(rows, card.signatures, card.call_sites) if card else ()

    def oldest_open(self, group: ProcessGroup, rank: int) -> Entry | None:
        """The first entry that is not over, of those at the end; None if the newest is, or it was not told."""
        card, excerpt = self._cards.get(rank), self._excerpts[group].get(rank)
        if card is None or excerpt is None:
            return None
        return next(iter(entries_of(excerpt.oldest_open, card.signatures, card.call_sites)), None)

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """The same entries as an array of ``ENTRY_DTYPE``."""
        return np.array(self._rows(group, rank, first, last), dtype=ENTRY_DTYPE)

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """A rank's signatures by number."""
        return self._cards[rank].signatures if rank in self._cards else {}

    def _rows(self, group: ProcessGroup, rank: int, first: int, last: int) -> list[tuple[int, ...]]:
        excerpt = self._excerpts[group].get(rank)
        return [row for row in excerpt.rows if first <= row[0] <= last] if excerpt else []

    @staticmethod
    def _newest_in(
        group: ProcessGroup, excerpts: Mapping[int, LogExcerpt], newest: Mapping[int, Mapping[str, int]]
    ) -> dict[int, int]:
        """By rank. Of sends and receives nothing is said but in full."""
        found = {rank: excerpt.newest for rank, excerpt in excerpts.items()}
        for rank in () if group.is_point_to_point else newest:
            if rank in group.ranks and group.name in newest[rank]:
                found[rank] = max(found.get(rank, 0), newest[rank][group.name])
        return dict(sorted(found.items()))
