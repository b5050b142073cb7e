"""Damage to a JSON text or a header page is noticed, and texts without a checksum are read as ever."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.checksum import (
    add_page_checksum,
    dump_json_line,
    dump_json_text,
    is_page_intact,
    parse_json_text,
)

CONTENT = {"name": 'größe "crc32":"00000000"', "shape": [3, 4], "nested": {"b": None, "a": 1.5}}
WRITTEN = [dump_json_line(CONTENT), dump_json_text(CONTENT)]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_text_comes_back_without_its_checksum(text: str) -> None:
    assert parse_json_text(text.encode()) == CONTENT
    assert json.loads(text).keys() == {*CONTENT, "crc32"}
    assert text.endswith("}\n")


@pytest.mark.parametrize("text", WRITTEN)
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_what_a_damaged_byte_makes_of_a_text_is_not_believed(text: str, place: int, change: int) -> None:
    data = bytearray(text.removesuffix("\n").encode())
    data[place % len(data)] ^= change
    try:
        content = parse_json_text(bytes(data))
    except ValueError:
        return
    # Only the name of the checksum can be another: then nothing is checked, and nothing else is wrong.
    assert {key: value for key, value in content.items() if key in CONTENT} == CONTENT


def test_a_text_without_a_checksum_is_taken_as_it_is() -> None:
    assert parse_json_text(b'{"a": 1}') == {"a": 1}


def test_a_content_that_was_read_elsewhere_can_be_written_again() -> None:
    assert parse_json_text(dump_json_text(json.loads(dump_json_text(CONTENT)) | {"more": 1}).encode()) == CONTENT | {
        "more": 1
    }


@pytest.mark.parametrize("write", [dump_json_line, dump_json_text])
def test_only_the_last_key_is_the_checksum(write: Callable[[dict[str, object]], str]) -> None:
    content: dict[str, object] = {"a": {"crc32": "12345678"}, "b": [{"crc32": "12345678"}]}
    assert parse_json_text(write(content).encode()) == content
    assert parse_json_text(json.dumps(content).encode()) == content


def test_a_page_is_what_was_written_or_it_is_not() -> None:
    page = add_page_checksum(b"header".ljust(64, b"\0"))
    assert is_page_intact(page)
    assert not is_page_intact(page.replace(b"h", b"H"))
    assert not is_page_intact(b"header".ljust(64, b"\0"))
