"""Small event logs for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.schema import HEADER_BYTES, RECORD_BYTES, Kind, Phase, pack_body

PHASE_BEGIN = pack_body(Kind.PHASE_BEGIN, index=Phase.FORWARD)


def bytes_for(records: int) -> int:
    """The limit of a log that holds so many records."""
    return HEADER_BYTES + records * RECORD_BYTES


def append_numbered(log: EventLogWriter, count: int, first: int = 1) -> None:
    """Append records whose start is their number, so that none can be taken for another."""
    for number in range(first, first + count):
        log.append(PHASE_BEGIN, number, number, number + 5, 3)


def make_log(path: Path, records: int, *, capacity: int | None = None, close: bool = True) -> EventLogWriter:
    """A log of numbered records."""
    log = EventLogWriter(path, bytes_for(capacity or max(64, records)))
    append_numbered(log, records)
    if close:
        log.close()
    return log
