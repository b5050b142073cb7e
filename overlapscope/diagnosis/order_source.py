"""Interfaces that read the order of collectives a few entries at a time: from logs, or dumps of another tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from overlapscope.diagnosis.evidence import Entry
from overlapscope.trace.group_log import Entries
from overlapscope.trace.signature import Signature


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A process group of the job, identified by its name and members."""

    name: str
    """Name of the group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Members of the group, whether or not they left anything."""
    is_point_to_point: bool = False
    """True for the group's sends and receives, which each rank numbers separately."""
    backend: str = field(default="", compare=False)
    description: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """Return the name of the group for a sentence."""
        name = self.name if self.description in ("", "undefined") else self.description.removesuffix("_pg")
        return f"{name}, sends and receives" if self.is_point_to_point else name


class OrderSource(Protocol):
    """The collectives of all ranks by group and number, with random access to a few of them."""

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each sorted by name."""
        ...

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that left entries, in order."""
        ...

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest entry that is left; 1 if there is none."""
        ...

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry; 0 if there is none."""
        ...

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        ...

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if the latest is completed."""
        ...


@runtime_checkable
class RunningHashes(OrderSource, Protocol):
    """A source whose entries hold running hashes, so that comparing one entry compares all entries up to it."""

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the entries as an array of ``overlapscope.trace.group_log.ENTRY_DTYPE``."""
        ...

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        ...
