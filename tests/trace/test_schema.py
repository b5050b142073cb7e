"""The layout on disk, and what a header page is refused for."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.event_log import RECORD_DTYPE
from overlapscope.trace.schema import (
    CHECKED_RECORD,
    DTYPES,
    HEADER_BYTES,
    OPS,
    RECORD,
    RECORD_BYTES,
    Flag,
    Kind,
    LogHeader,
    add_page_checksum,
    is_page_intact,
    pack_body,
)

PATH = Path("rank_0/events.log")
HEADER = LogHeader(capacity_records=1000, pinned_records=125, written_records=7, closed=True)


def test_writer_and_reader_agree_on_the_size_of_a_record() -> None:
    assert CHECKED_RECORD.size == RECORD_DTYPE.itemsize == RECORD_BYTES


@given(
    kind=st.sampled_from(Kind),
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(DTYPES),
    flags=st.integers(0, 15),
    index=st.integers(0, 2**32 - 1),
    model=st.integers(0, 2**16 - 1),
    group=st.integers(0, 2**16 - 1),
    elements=st.integers(0, 2**64 - 1),
    plan_epoch=st.integers(0, 2**16 - 1),
    call_site=st.integers(0, 2**16 - 1),
    plan_hash=st.integers(0, 2**32 - 1),
    start_ns=st.integers(-(2**63), 2**63 - 1),
    end_ns=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**32 - 1),
    uncertainty=st.integers(0, 2**32 - 1),
)
def test_every_field_comes_back_as_it_was_packed(
    kind, op, dtype, flags, index, model, group, elements, plan_epoch, call_site, plan_hash,
    start_ns, end_ns, step, uncertainty,
) -> None:  # fmt: skip
    body = pack_body(
        kind, op=op, dtype=dtype, flags=Flag(flags), index=index, model=model, group=group, elements=elements,
        plan_epoch=plan_epoch, call_site=call_site, plan_hash=plan_hash,
    )  # fmt: skip
    checked = RECORD.pack(start_ns, end_ns, step, uncertainty, body, 9)
    packed = CHECKED_RECORD.pack(crc32(checked), checked)
    record = np.frombuffer(packed, dtype=RECORD_DTYPE)[0]
    assert {name: int(record[name]) for name in RECORD_DTYPE.names} == {
        "crc32": crc32(checked),
        "start_ns": start_ns, "end_ns": end_ns, "step": step, "end_uncertainty_ns": uncertainty,
        "kind": kind, "op": OPS.index(op), "dtype": DTYPES.index(dtype), "flags": flags, "index": index,
        "model": model, "group": group, "elements": elements, "plan_epoch": plan_epoch, "call_site": call_site,
        "plan_hash": plan_hash, "sequence": 9,
    }  # fmt: skip


def test_an_element_type_that_is_not_known_is_recorded_as_unknown() -> None:
    assert pack_body(Kind.LAUNCH, dtype="float4_e2m1") == pack_body(Kind.LAUNCH, dtype="unknown")


def test_the_header_comes_back_as_it_was_packed() -> None:
    assert LogHeader.unpack(HEADER.pack(), PATH) == HEADER


def test_the_header_page_explains_itself() -> None:
    """A reader that knows only the place of the JSON can decode a log."""
    page = HEADER.pack()
    assert len(page) == HEADER_BYTES
    begin = struct.calcsize("<8sIIIIQQQ")
    length = int.from_bytes(page[begin : begin + 4], "little")
    layout = json.loads(page[begin + 4 : begin + 4 + length])
    assert np.dtype([tuple(field) for field in layout["record"]]) == RECORD_DTYPE
    assert layout["kinds"][str(int(Kind.LAUNCH))] == "launch"
    assert layout["ops"] == list(OPS)


def test_a_newer_format_is_refused_with_both_versions_and_what_to_do() -> None:
    with pytest.raises(OverlapScopeError, match=r"rank_0/events.log: written in trace format 2.* up to 1; upgrade"):
        LogHeader.unpack(replace(HEADER, version=2).pack(), PATH)


@pytest.mark.parametrize("page", [b"", b"PK\x03\x04" + bytes(5000), bytes(HEADER_BYTES), b"OVLSCOPX" + bytes(100)])
def test_what_is_not_an_event_log_is_refused(page: bytes) -> None:
    with pytest.raises(OverlapScopeError, match="not an OverlapScope event log"):
        LogHeader.unpack(page, PATH)


def test_a_header_with_other_record_sizes_is_refused_at_its_offset() -> None:
    page = bytearray(HEADER.pack())
    page[16:20] = (48).to_bytes(4, "little")
    with pytest.raises(OverlapScopeError, match=r"corrupt header \(offset 12: 4096-byte header and 48-byte records"):
        LogHeader.unpack(bytes(page), PATH)


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_a_header_or_a_one_line_error(tail: bytes, marked: bool) -> None:
    page = (b"OVLSCOPE" if marked else b"") + tail
    refusal = "rank_0/events.log: in one line"
    try:
        LogHeader.unpack(page, PATH)
    except OverlapScopeError as error:
        refusal = str(error)
    assert refusal.startswith("rank_0/events.log: ")
    assert "\n" not in refusal


def test_a_page_is_what_was_written_or_it_is_not() -> None:
    page = add_page_checksum(b"header".ljust(64, b"\0"))
    assert is_page_intact(page)
    assert not is_page_intact(page.replace(b"h", b"H"))
    assert not is_page_intact(b"header".ljust(64, b"\0"))
