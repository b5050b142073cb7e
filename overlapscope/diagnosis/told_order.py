"""Order of collectives reported by the ranks while the job runs: a few entries of each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from overlapscope.diagnosis.card import LogExcerpt, RankSnapshot
from overlapscope.diagnosis.entries import decode_entries
from overlapscope.diagnosis.evidence import Entry
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.trace.group_log import ENTRY_DTYPE, Entries
from overlapscope.trace.signature import Signature


class LiveCollectiveOrder:
    """An ``OrderSource`` of rank snapshots.

    Args:
        cards: snapshot of each rank.
        newest: latest reported number of ranks, by rank and name of the group: their snapshots may be older.
    """

    def __init__(self, cards: Mapping[int, RankSnapshot], latest: Mapping[int, Mapping[str, int]]) -> None:
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
            group: self._newest_in(group, excerpts, latest)
            for group, excerpts in sorted(
                self._excerpts.items(), key=lambda item: (item[0].is_point_to_point, item[0].name, item[0].ranks)
            )
        }

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each in the order of their names."""
        return tuple(self._newest)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that reported their progress, in order."""
        return tuple(self._newest[group])

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest reported entry; one more than the latest if there is none."""
        excerpt = self._excerpts[group].get(rank)
        return excerpt.rows[0][0] if excerpt and excerpt.rows else self.latest(group, rank) + 1

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry, reported or not; 0 if there is none."""
        return self._newest[group].get(rank, 0)

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the reported entries with the numbers ``first`` to ``last``, in order."""
        card = self._cards.get(rank)
        rows = self._rows(group, rank, first, last)
        return decode_entries(rows, card.signatures, card.call_sites) if card else ()

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if there is none or it is unreported."""
        card, excerpt = self._cards.get(rank), self._excerpts[group].get(rank)
        if card is None or excerpt is None:
            return None
        return next(iter(decode_entries(excerpt.oldest_incomplete, card.signatures, card.call_sites)), None)

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the same entries as an array of ``ENTRY_DTYPE``."""
        return np.array(self._rows(group, rank, first, last), dtype=ENTRY_DTYPE)

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        return self._cards[rank].signatures if rank in self._cards else {}

    def _rows(self, group: ProcessGroup, rank: int, first: int, last: int) -> list[tuple[int, ...]]:
        excerpt = self._excerpts[group].get(rank)
        return [row for row in excerpt.rows if first <= row[0] <= last] if excerpt else []

    @staticmethod
    def _newest_in(
        group: ProcessGroup, excerpts: Mapping[int, LogExcerpt], latest: Mapping[int, Mapping[str, int]]
    ) -> dict[int, int]:
        """Return the latest number by rank; for sends and receives from snapshots only."""
        found = {rank: excerpt.latest for rank, excerpt in excerpts.items()}
        for rank in () if group.is_point_to_point else latest:
            if rank in group.ranks and group.name in latest[rank]:
                found[rank] = max(found.get(rank, 0), latest[rank][group.name])
        return dict(sorted(found.items()))
