"""Last known position of each rank, as the Order page lists it: ranks at the same position together."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import Evidence, Liveness, RankEvidence
from overlapscope.diagnosis.wording import capitalize, format_position, format_recorded_until, rank_list

_MAX_POSITIONS: Final = 12

FAULT_STATES: Final[dict[Liveness, str]] = {
    "stopped": "stopped",
    "gone": "gone",
    "failed": "failed",
    "never started": "never started",
    "silent": "silent",
}
"""States of a rank that are relevant to the fault."""


def list_rank_positions(evidence: Evidence) -> list[tuple[str, str]]:
    """Return the ranks at each position, the smallest groups first, because these are the outliers."""
    same: dict[str, list[int]] = {}
    for rank, one in sorted(evidence.ranks.items()):
        same.setdefault(_describe_position(one), []).append(rank)
    missing = [rank for rank in evidence.expected_ranks if rank not in evidence.ranks]
    if missing:
        same["left no log"] = missing
    if not any(same):
        return []
    oddest_first = sorted(same.items(), key=lambda item: len(item[1]))
    lines = [(capitalize(rank_list(ranks)), where or "unknown") for where, ranks in oddest_first]
    more = [("And", f"{len(lines) - _MAX_POSITIONS} more places")] if len(lines) > _MAX_POSITIONS else []
    return [*lines[:_MAX_POSITIONS], *more]


def _describe_position(one: RankEvidence) -> str:
    parts: list[str] = [] if one.liveness == "unknown" else [one.liveness]
    if one.unrecorded_because is not None:
        parts.append(format_recorded_until(one))
    elif one.failure is not None:
        site = f" at {one.failure.call_site}" if one.failure.call_site else ""
        parts.append(f"{one.failure.type}{site}")
    elif one.position is not None:
        parts.append(format_position(one.position))
    return ", ".join(parts)
