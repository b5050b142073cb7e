"""Where the order of collectives is read from, a few entries at a time: collective logs, or dumps of another tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from overlapscope.diagnosis.evidence import Entry


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A process group of the job. Two ranks mean the same one if name and members are equal."""

    name: str
    """The same on all of its ranks."""
    ranks: tuple[int, ...]
    """Its members, whether or not they have left anything."""
    is_point_to_point: bool = False
    """Its sends and receives, which are numbered apart, and by each rank for itself."""
    backend: str = field(default="", compare=False)
    description: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """What to call it in a sentence."""
        name = self.name if self.description in ("", "undefined") else self.description.removesuffix("_pg")
        return f"{name}, sends and receives" if self.is_point_to_point else name


class OrderSource(Protocol):
    """The collectives of all ranks by group and number, of which any few can be had without reading the others."""

    def groups(self) -> tuple[ProcessGroup, ...]:
        """All groups in which anything was launched: collectives first, each in the order of their names."""
        ...

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """The members of a group that have left entries, in order."""
        ...

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Number of the oldest entry that is left; 1 if none is."""
        ...

    def newest(self, group: ProcessGroup, rank: int) -> int:
        """Number of the newest entry; 0 if there is none."""
        ...

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """The entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        ...
