"""Segments: the rounds of a bucket's all-reduce, for strategies that implement it with sends and receives.

A round recurs in every step, so its description is a line in ``segments.jsonl``, and a record has only its number and
its times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from overlapscope.trace.checksum import dump_json_line

SEGMENTS_FILE: Final = "segments.jsonl"

Message = tuple[int, int]
"""Peer (rank of the job) and size in bytes."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Round of one rank: messages that are in flight at the same time."""

    bucket: int
    lane: int = 0
    """Number that tells apart all-reduces that run in parallel."""
    phase: str = ""
    """Name that the strategy gives to this part of the all-reduce, such as ``reduce-scatter``."""
    round: int = 1
    """Number of the round within the phase, from 1."""
    rounds: int = 0
    """Number of rounds of the phase, equal on all ranks; 0: unknown, and ``round`` is the rank's own count."""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()

    def to_json(self, number: int) -> str:
        """Serialize a line of ``segments.jsonl``, with its line end."""
        return dump_json_line({"segment": number, **asdict(self)})
