"""Checksums, by which a reader notices damage: of a JSON text, and of the header page of a log.

A JSON text carries its own as its last key, ``"crc32": "1a2b3c4d"``: the CRC-32 of the text without a line's end, with
zeros in place of the eight digits. The last four bytes of a header page hold the CRC-32 of all before them. What has
none was written by an older version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final
from zlib import crc32

KEY: Final = "crc32"
_NO_DIGITS: Final = b"00000000"
_CHECKSUM: Final = re.compile(rb'"crc32": ?"(.{8})"\s*\}\s*\Z', re.DOTALL)
_PAGE_CHECKSUM_BYTES: Final = 4


def json_line(content: Mapping[str, Any]) -> str:
    """A line of a ``.jsonl`` file, with its checksum and its end."""
    text = json.dumps(_without_checksum(content), separators=(",", ":"))
    return _with_checksum(text[:-1] + f',"{KEY}":"00000000"}}') + "\n"


def json_text(content: Mapping[str, Any]) -> str:
    """A JSON file for people as well, sorted by key, with its checksum."""
    text = json.dumps(_without_checksum(content), indent=1, sort_keys=True)
    return _with_checksum(text.removesuffix("\n}") + f',\n "{KEY}": "00000000"\n}}') + "\n"


def read_json_text(data: bytes) -> Any:
    """What a text with or without a checksum holds, without its checksum.

    Raises:
        ValueError: it is no JSON, or not what was written.
    """
    content = json.loads(data)
    found = _CHECKSUM.search(data)
    if found is not None:
        begin, end = found.span(1)
        if found[1] != b"%08x" % crc32(data[:begin] + _NO_DIGITS + data[end:].rstrip(b"\n")):
            raise ValueError("its checksum is wrong")
    return _without_checksum(content) if isinstance(content, dict) else content


def has_checksum(data: bytes) -> bool:
    """Whether a text has one: older texts have none."""
    return _CHECKSUM.search(data) is not None


def with_page_checksum(page: bytes) -> bytes:
    """A header page whose last bytes, which it leaves free, hold its checksum."""
    content = page[:-_PAGE_CHECKSUM_BYTES]
    return content + crc32(content).to_bytes(_PAGE_CHECKSUM_BYTES, "little")


def is_page_intact(page: bytes, *, has_checksum: bool) -> bool:
    """Whether a header page is what was written.

    Args:
        has_checksum: it says that it is of a version that has one; in older ones, zeros are in its place.
    """
    is_without = not has_checksum and not any(page[-_PAGE_CHECKSUM_BYTES:])
    return is_without or with_page_checksum(page) == page


def _without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != KEY}


def _with_checksum(text: str) -> str:
    """A text that ends with zeros for its checksum, with the checksum."""
    data = text.encode()
    begin = data.rindex(_NO_DIGITS)
    return text[:begin] + f"{crc32(data):08x}" + text[begin + len(_NO_DIGITS) :]
