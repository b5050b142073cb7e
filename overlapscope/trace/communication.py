"""Communication by process group and operation: of imported profiles (in ``run.json``), and the script's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from overlapscope.trace.json_files import from_dict

ENDS_TOGETHER: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that no rank can leave before the last has come."""


@dataclass(frozen=True, kw_only=True)
class GroupCommunication:
    """The collectives of one operation in one process group: sums of a rank, as means of the ranks that have any."""

    group: str
    """Description or name of the group; empty if the profiles don't tell groups apart."""
    op: str
    is_bucket: bool
    """True for all-reduces of DDP's buckets."""
    ranks: int
    """Number of ranks that have any."""
    count: float
    """Number of collectives of a rank."""
    bytes: float
    time_ns: float | None
    """None if the ends are unknown."""
    exposed_ns: float | None
    """Time in which nothing was computed; of a recording, in which the line that launched it waited."""
    wait_ns: float | None
    """Time for which ranks waited for the last one; None if they can't be compared."""
    last_ranks: dict[str, tuple[int, int]]
    """By rank, how many collectives it was clearly the last to start, of how many; most first."""
    groups: int = 1
    """Number of groups with this description."""
    members: int = 0
    """Number of ranks of each; 0 if unknown."""
    is_join: bool = False
    """True for those of ``join()``, in which ranks count who still has inputs."""


@dataclass(frozen=True, kw_only=True)
class ImportedCommunication:
    """Communication in the profiles of all ranks: means of ranks, sums over the steps, or without steps over all."""

    ranks: int
    steps: int
    """Number of steps of each rank; 0 if the profiles have none."""
    time_ns: float
    compute_ns: float
    """Time in which something was computed, beside communication or not."""
    exposed_ns: float
    """Time in which there was communication only."""
    idle_ns: float
    """Time in which nothing ran, or only copies."""
    groups: tuple[GroupCommunication, ...]

    @property
    def others(self) -> tuple[GroupCommunication, ...]:
        """Return the collectives that are not DDP's: neither buckets nor broadcasts of buffers beside them."""
        has_buckets = any(one.is_bucket for one in self.groups)
        return tuple(one for one in self.groups if not one.is_bucket and not (has_buckets and one.op == "broadcast"))

    def to_json(self) -> dict[str, Any]:
        """Serialize for ``run.json``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class OwnCommunication:
    """The script's own collectives in a recording: means of ranks and steps, or without steps sums over all."""

    ranks: int
    """Number of ranks that have any."""
    steps: int
    groups: tuple[GroupCommunication, ...]
    has_other_groups: bool
    """True if any is in another group than the default one and those of DDP."""


def read_imported_communication(run: Mapping[str, Any]) -> ImportedCommunication | None:
    """Return the communication of an import; None if it is none, or has no profiles or damaged ones."""
    imported = run.get("imported")
    content = imported.get("communication") if isinstance(imported, dict) else None
    try:
        return None if content is None else from_dict(ImportedCommunication, content)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
