"""Checksums of many records at once are those that zlib takes of each."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.event_log import RECORD_DTYPE, compute_record_checksums
from overlapscope.trace.schema import RECORD_BYTES


@given(content=st.binary(min_size=RECORD_BYTES, max_size=20 * RECORD_BYTES))
def test_they_are_those_of_zlib(content: bytes) -> None:
    records = np.frombuffer(content[: len(content) // RECORD_BYTES * RECORD_BYTES], dtype=RECORD_DTYPE)
    assert compute_record_checksums(records).tolist() == [crc32(record.tobytes()[4:]) for record in records]


@pytest.mark.parametrize("count", [0, 1, 8192, 8193, 20_000])
def test_of_any_number_of_records(count: int) -> None:
    records = np.zeros(count, dtype=RECORD_DTYPE)
    records["sequence"] = np.arange(count)
    assert compute_record_checksums(records).tolist() == [crc32(record.tobytes()[4:]) for record in records]


def test_records_need_not_lie_side_by_side() -> None:
    records = np.zeros(100, dtype=RECORD_DTYPE)
    records["sequence"] = np.arange(100)
    assert compute_record_checksums(records[::7]).tolist() == compute_record_checksums(records)[::7].tolist()
