"""Rounds of rings in a recording made up by ``tests.synthetic``."""

from __future__ import annotations

from pathlib import Path

from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.schema import SEGMENTS_FILE, Kind, Segment, pack_body, rank_folder
from tests.synthetic import US, make_rank, write_step

ROUNDS = (("reduce-scatter", 4050, 4300), ("all-gather", 4350, 4750))
"""Of the first bucket, of two ranks: phase, and microseconds from the begin of the step."""
BYTES = 512 * 1024


def write_ring_recording(folder: Path, *, steps: int = 3) -> Path:
    """Two ranks, of which the sum of the first bucket of each step is a ring; ``write_step`` has the other numbers."""
    for rank in range(2):
        log = make_rank(folder, rank, world_size=2)
        for step in range(steps):
            write_ring_step(log, step, begin_ns=1_000_000_000 + step * 10_000 * US)
        log.close()
        (rank_folder(folder, rank) / SEGMENTS_FILE).write_text(
            "".join(
                Segment(
                    bucket=0, phase=phase, rounds=1, sends=((1 - rank, BYTES),), receives=((1 - rank, BYTES),)
                ).to_json(number)
                for number, (phase, _, _) in enumerate(ROUNDS, start=1)
            )
        )
    return folder


def write_ring_step(log: EventLogWriter, step: int, begin_ns: int) -> None:
    """The rounds before the record of the step itself, as they are written."""
    for number, (_, start_us, end_us) in enumerate(ROUNDS, start=1):
        log.append(pack_body(Kind.SEGMENT, index=number), step, begin_ns + start_us * US, begin_ns + end_us * US)
    write_step(log, step, begin_ns)
