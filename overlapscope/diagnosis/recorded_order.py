"""The order of collectives as the collective logs of a recording hold it."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.trace.format import Phase
from overlapscope.trace.group_log import UNKNOWN, Entries
from overlapscope.trace.group_reader import CollectiveLogs, GroupFiles
from overlapscope.trace.signature import NO_BUCKET, Signature

UNKNOWN_SIGNATURE: Final = Signature(op="unknown")
"""Of an entry whose line in ``signatures.jsonl`` is lost."""

_PHASES: Final = {phase.value: phase.name.lower() for phase in Phase}


class RecordedOrder:
    """An ``OrderSource`` of collective logs, which also gives the running hashes and whole columns."""

    def __init__(self, logs: CollectiveLogs) -> None:
        self.logs = logs
        self._tables: dict[int, SignatureTable] = {}

    @cached_property
    def _files(self) -> dict[ProcessGroup, GroupFiles]:
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
        """All groups in which anything was launched: collectives first, each in the order of their names."""
        return tuple(self._files)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """The members of a group that have left entries, in order."""
        return tuple(sorted(rank for rank, file in self._files[group].files.items() if file.newest))

    def groups_of(self, rank: int) -> tuple[ProcessGroup, ...]:
        """The groups in which a rank has left entries."""
        return tuple(group for group, files in self._files.items() if rank in files.files)

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Number of the oldest entry that is left; 1 if none is."""
        file = self._files[group].files.get(rank)
        return file.oldest if file else 1

    def newest(self, group: ProcessGroup, rank: int) -> int:
        """Number of the newest entry; 0 if there is none."""
        file = self._files[group].files.get(rank)
        return file.newest if file else 0

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """The entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        rows = self.columns(group, rank, first, last)
        if not len(rows):
            return ()
        signatures, sites = self.logs.signatures(rank), self.logs.call_sites(rank)
        shown = {
            number: self.logs.named(rank, signatures.get(number, UNKNOWN_SIGNATURE))
            for number in set(rows["signature"].tolist())
        }
        return tuple(
            Entry(
                number=number,
                signature=shown[signature],
                step=step,
                batch=None if batch == UNKNOWN else batch,
                phase=_PHASES.get(phase),
                call_site=_call_site(sites.get(call_site)),
                flags=flags,
                announced_ns=announced_ns,
                launched_ns=launched_ns or None,
                completed_ns=completed_ns or None,
            )
            for (
                number,
                signature,
                call_site,
                step,
                batch,
                phase,
                flags,
                _,
                _,
                _,
                announced_ns,
                launched_ns,
                completed_ns,
            ) in rows.tolist()
        )

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """The same entries as an array of ``ENTRY_DTYPE``."""
        file = self._files[group].files.get(rank)
        return file.read(first, last) if file else np.empty(0, dtype=np.dtype([]))

    def table(self, rank: int) -> SignatureTable:
        """What a rank's numbers of signatures mean, for whole columns."""
        if rank not in self._tables:
            self._tables[rank] = SignatureTable(self.logs.signatures(rank))
        return self._tables[rank]


class SignatureTable:
    """Properties of signatures, to be looked up for many entries at once."""

    def __init__(self, signatures: dict[int, Signature]) -> None:
        size = max(signatures, default=0) + 1
        self._hashes = np.zeros(size, dtype=np.uint64)
        self._names = np.zeros(size, dtype=np.uint64)
        self._is_bucket = np.zeros(size, dtype=bool)
        for number, signature in signatures.items():
            self._hashes[number] = signature.hash
            self._names[number] = signature.names_hash
            self._is_bucket[number] = signature.bucket != NO_BUCKET

    def hashes(self, entries: Entries) -> npt.NDArray[np.uint64]:
        """What must agree."""
        return self._hashes[self._known(entries)]

    def names(self, entries: Entries) -> npt.NDArray[np.uint64]:
        """What the tensors are called; 0 if that is not known."""
        return self._names[self._known(entries)]

    def is_bucket(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Whether it is a bucket's."""
        return self._is_bucket[self._known(entries)]

    def _known(self, entries: Entries) -> npt.NDArray[np.int64]:
        number = entries["signature"].astype(np.int64)
        return np.where(number < len(self._hashes), number, 0)


def _call_site(site: tuple[str, int, str] | None) -> CallSite | None:
    return None if site is None else CallSite(file=site[0], line=site[1], function=site[2])
