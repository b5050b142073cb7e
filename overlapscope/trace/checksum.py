"""Checksums by which a reader detects damage, of JSON texts and of the header page of a log.

A JSON text has its checksum as its last key, ``"crc32": "1a2b3c4d"``: the CRC-32 of the text without the line end, with
zeros in place of the eight digits. The last four bytes of a header page hold the CRC-32 of all bytes before them. A
text without a checksum, such as one written by hand, is taken as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final
from zlib import crc32

CHECKSUM_KEY: Final = "crc32"
_NO_DIGITS: Final = b"00000000"
_CHECKSUM: Final = re.compile(rb'"crc32": ?"(.{8})"\s*\}\s*\Z', re.DOTALL)
_PAGE_CHECKSUM_BYTES: Final = 4


def dump_json_line(content: Mapping[str, Any]) -> str:
    """Serialize a line of a ``.jsonl`` file, with its checksum and line end."""
    text = json.dumps(_without_checksum(content), separators=(",", ":"))
    return _with_checksum(text[:-1] + f',"{CHECKSUM_KEY}":"00000000"}}') + "\n"


def dump_json_text(content: Mapping[str, Any]) -> str:
    """Serialize a JSON file that people read too: indented and sorted by key, with its checksum."""
    text = json.dumps(_without_checksum(content), indent=1, sort_keys=True)
    return _with_checksum(text.removesuffix("\n}") + f',\n "{CHECKSUM_KEY}": "00000000"\n}}') + "\n"


def parse_json_text(data: bytes) -> Any:
    """Parse a JSON text with or without a checksum, and drop the checksum.

    Raises:
        ValueError: the text is not JSON, or its checksum is wrong.
    """
    content = json.loads(data)
    found = _CHECKSUM.search(data)
    if found is not None:
        begin, end = found.span(1)
        if found[1] != b"%08x" % crc32(data[:begin] + _NO_DIGITS + data[end:].rstrip(b"\n")):
            raise ValueError("its checksum is wrong")
    return _without_checksum(content) if isinstance(content, dict) else content


def add_page_checksum(page: bytes) -> bytes:
    """Return a header page with its checksum in the last bytes, which must be unused."""
    content = page[:-_PAGE_CHECKSUM_BYTES]
    return content + crc32(content).to_bytes(_PAGE_CHECKSUM_BYTES, "little")


def is_page_intact(page: bytes) -> bool:
    """Return whether a header page is unchanged since it was written."""
    return add_page_checksum(page) == page


def _without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != CHECKSUM_KEY}


def _with_checksum(text: str) -> str:
    """Replace the zeros at the end of a text by its checksum."""
    data = text.encode()
    begin = data.rindex(_NO_DIGITS)
    return text[:begin] + f"{crc32(data):08x}" + text[begin + len(_NO_DIGITS) :]
