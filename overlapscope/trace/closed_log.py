"""Serialization of a complete event log, for recordings that are made without a training run."""

from __future__ import annotations

from overlapscope.trace.format import LogHeader
from overlapscope.trace.log import Records
from overlapscope.trace.record_checksums import compute_record_checksums


def serialize_event_log(records: Records) -> bytes:
    """Serialize a closed event log that holds these records, with checksums."""
    count = len(records)
    written = records.copy()
    written["crc32"] = compute_record_checksums(written)
    header = LogHeader(capacity_records=count, pinned_records=count, written_records=count, closed=True)
    return header.pack() + written.tobytes()
