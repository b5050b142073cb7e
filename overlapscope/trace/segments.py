"""What the sum of a bucket is made of, if a strategy makes it of sends and receives: rounds, a record each.

What a round *is* recurs in every step, so it is a line in ``segments.jsonl``, and a record is its number and its times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from overlapscope.trace.checksum import json_line

SEGMENTS_FILE: Final = "segments.jsonl"

Message = tuple[int, int]
"""The other side, as rank of the job, and bytes."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A round of one rank: messages that are under way at the same time."""

    bucket: int
    lane: int = 0
    """Of sums side by side each has a number."""
    phase: str = ""
    """What the strategy calls this part of the sum, such as ``reduce-scatter``."""
    round: int = 1
    """Within the phase, from 1."""
    rounds: int = 0
    """How many the phase has on all ranks alike; 0: unknown, and ``round`` is the rank's own count."""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()

    def to_json(self, number: int) -> str:
        """A line of ``segments.jsonl``, with its end."""
        return json_line({"segment": number, **asdict(self)})
