"""Last known position of each rank, as the Order page lists it: ranks at the same position together."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import Evidence, Liveness, RankEvidence
from overlapscope.diagnosis.wording import capitalised, ranks_text, standing_text, unrecorded_text

_MOST_LINES: Final = 12

NOTEWORTHY: Final[dict[Liveness, str]] = {
    "stopped": "stopped",
    "gone": "gone",
    "failed": "failed",
    "never started": "never started",
    "silent": "silent",
}
"""States of a rank that are relevant to the fault."""


def standings(evidence: Evidence) -> list[tuple[str, str]]:
    """Return the ranks at each position, the smallest groups first, because these are the outliers."""
    same: dict[str, list[int]] = {}
    for rank, one in sorted(evidence.ranks.items()):
        same.setdefault(_where(one), []).append(rank)
    missing = [rank for rank in evidence.expected_ranks if rank not in evidence.ranks]
    if missing:
        same["left no log"] = missing
    if not any(same):
        return []
    oddest_first = sorted(same.items(), key=lambda item: len(item[1]))
    lines = [(capitalised(ranks_text(ranks)), where or "unknown") for where, ranks in oddest_first]
    more = [("And", f"{len(lines) - _MOST_LINES} more places")] if len(lines) > _MOST_LINES else []
    return [*lines[:_MOST_LINES], *more]


def _where(one: RankEvidence) -> str:
    parts: list[str] = [] if one.liveness == "unknown" else [one.liveness]
    if one.unrecorded_because is not None:
        parts.append(unrecorded_text(one))
    elif one.failure is not None:
        site = f" at {one.failure.call_site}" if one.failure.call_site else ""
        parts.append(f"{one.failure.type}{site}")
    elif one.standing is not None:
        parts.append(standing_text(one.standing))
    return ", ".join(parts)
