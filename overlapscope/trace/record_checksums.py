"""The CRC-32 of very many records at once, which ``zlib`` would take one by one.

Of messages of one length, what a bit adds to the CRC does not depend on the others: ``crc(a ^ b) = crc(a) ^ crc(b) ^
crc(0)``. So the CRC of a record is the exclusive or of a number for each of its words, from a table by place and value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from overlapscope.trace.format import RECORD_BYTES

_CHECKSUM_BYTES: Final = 4
"""At the beginning of a record, the CRC of the rest of it."""
_WORD: Final = np.dtype("<u2")
_WORDS: Final = RECORD_BYTES // _WORD.itemsize
_FIRST_WORD: Final = _CHECKSUM_BYTES // _WORD.itemsize
_AT_ONCE: Final = 8192
"""The words of so many records stay in a processor's caches."""


def record_checksums(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """(N,) what the CRC-32 of each record of ``RECORD_BYTES`` is, but for the checksum that it begins with."""
    words = np.ascontiguousarray(records).view(_WORD).reshape(-1, _WORDS)
    checksums = np.full(len(words), _of_zeros(), dtype=np.uint32)
    tables = _tables() if len(words) else ()
    for begin in range(0, len(words), _AT_ONCE):
        some = checksums[begin : begin + _AT_ONCE]
        columns = np.ascontiguousarray(words[begin : begin + _AT_ONCE, _FIRST_WORD:].T)
        for table, column in zip(tables, columns, strict=True):
            some ^= table.take(column)
    return checksums


def _of_zeros() -> int:
    return crc32(bytes(RECORD_BYTES - _CHECKSUM_BYTES))


@lru_cache(maxsize=1)
def _tables() -> npt.NDArray[np.uint32]:
    """(words, values of a word) what each adds."""
    bits = 8 * _WORD.itemsize
    tables = np.zeros((_WORDS - _FIRST_WORD, 1 << bits), dtype=np.uint32)
    for bit in range(bits):
        for place, table in enumerate(tables):
            message = bytearray(RECORD_BYTES - _CHECKSUM_BYTES)
            message[place * _WORD.itemsize + bit // 8] = 1 << bit % 8
            table[1 << bit : 2 << bit] = table[: 1 << bit] ^ np.uint32(crc32(message) ^ _of_zeros())
    return tables
