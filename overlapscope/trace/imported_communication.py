"""What the profiles of an import say of all communication, also of that which no step has: a part of ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from overlapscope.trace.json_files import from_dict


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
    time_ns: float
    exposed_ns: float
    """Time in which nothing was computed."""
    wait_ns: float | None
    """Time for which ranks waited for the last one; None if they can't be compared."""
    last_ranks: dict[str, tuple[int, int]]
    """By rank, how many collectives it was clearly the last to start, of how many; most first."""


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

    @property
    def tells_last_ranks(self) -> bool:
        """Return whether it is known of any collective which rank was the last to start it."""
        return any(one.last_ranks for one in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Serialize for ``run.json``."""
        return asdict(self)


def read_imported_communication(run: Mapping[str, Any]) -> ImportedCommunication | None:
    """Return the communication of an import; None if it is none, or has no profiles or damaged ones."""
    imported = run.get("imported")
    content = imported.get("communication") if isinstance(imported, dict) else None
    try:
        return None if content is None else from_dict(ImportedCommunication, content)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
