"""Parsing and formatting of rank numbers and ranges, such as ``0-7, 12``."""

from __future__ import annotations

import re
from collections.abc import Sequence


def parse_ranks(text: str, known: Sequence[int]) -> tuple[list[int], list[str]]:
    """Parse ranks and ranges of ranks, such as ``0-7, 12``.

    Args:
        known: The existing ranks.

    Returns:
        Each known rank once, in the order given; and the parts of the text that match no rank.
    """
    found: dict[int, None] = {}
    unknown = []
    for part in re.split(r"[,\s]+", text):
        bounds = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if bounds is None:
            continue
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        meant = [rank for rank in known if first <= rank <= last]
        found.update(dict.fromkeys(meant))
        if not meant:
            unknown.append(part)
    return list(found), unknown


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks so that ``parse_ranks`` can read them: ``0-7, 12``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
