"""Order of collectives from the collective logs of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from overlapscope.diagnosis.entries import decode_entries
from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.trace.group_log import Entries, oldest_incomplete
from overlapscope.trace.group_reader import CollectiveLogs, GroupLogs
from overlapscope.trace.signature import Signature


class RecordedOrder:
    """The collective logs of a recording as an ``OrderSource`` with running hashes."""

    def __init__(self, logs: CollectiveLogs) -> None:
        self.logs = logs
        self._call_sites: dict[int, dict[int, CallSite]] = {}

    @cached_property
    def _files(self) -> dict[ProcessGroup, GroupLogs]:
        found = [
            ProcessGroup(
                name=files.name,
                ranks=files.ranks,
                is_point_to_point=files.is_point_to_point,
                backend=files.backend,
                description=files.description,
            )
            for files in self.logs.groups.values()
        ]
        pairs = zip(found, self.logs.groups.values(), strict=True)
        return dict(sorted(pairs, key=lambda pair: (pair[0].is_point_to_point, pair[0].name, pair[0].ranks)))

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each sorted by name."""
        return tuple(self._files)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that left entries, in order."""
        return tuple(sorted(rank for rank, file in self._files[group].files.items() if file.latest))

    def groups_of(self, rank: int) -> tuple[ProcessGroup, ...]:
        """Return the groups in which a rank left entries."""
        return tuple(group for group, files in self._files.items() if rank in files.files)

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest entry that is left; 1 if there is none."""
        file = self._files[group].files.get(rank)
        return file.oldest if file else 1

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry; 0 if there is none."""
        file = self._files[group].files.get(rank)
        return file.latest if file else 0

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        rows = self.columns(group, rank, first, last)
        if not len(rows):
            return ()
        signatures = self.signatures(rank)
        used = set(rows["signature"].tolist())
        named = {number: self.logs.named(rank, signatures[number]) for number in used if number in signatures}
        return decode_entries(rows.tolist(), named, self.call_sites(rank))

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if the latest is completed."""
        file = self._files[group].files.get(rank)
        numbers = [] if file is None else oldest_incomplete(file)["number"].tolist()
        return next((entry for number in numbers for entry in self.entries(group, rank, number, number)), None)

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the entries with the numbers ``first`` to ``last``, as an array of ``ENTRY_DTYPE``."""
        file = self._files[group].files.get(rank)
        return file.read(first, last) if file else np.empty(0, dtype=np.dtype([]))

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        return self.logs.signatures(rank)

    def call_sites(self, rank: int) -> Mapping[int, CallSite]:
        """Return a rank's call sites by number."""
        if rank not in self._call_sites:
            self._call_sites[rank] = {
                number: CallSite(file=file, line=line, function=function)
                for number, (file, line, function) in self.logs.call_sites(rank).items()
            }
        return self._call_sites[rank]

    def newest_of(self, rank: int) -> Entry | None:
        """Return the last entry of a rank in any group."""
        latest: list[Entry] = []
        for group in self.groups_of(rank):
            number = self.latest(group, rank)
            latest += self.entries(group, rank, number, number)
        return max(latest, key=lambda entry: entry.announced_ns, default=None)
