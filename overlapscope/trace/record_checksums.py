"""Vectorized CRC-32 of many records at once, which ``zlib`` would compute one by one.

For messages of one length, the contribution of a bit to the CRC does not depend on the other bits: ``crc(a ^ b) =
crc(a) ^ crc(b) ^ crc(0)``. So the CRC of a record is the XOR of one number per word, from a table by position and value
of the word.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from overlapscope.trace.format import RECORD_BYTES

_CHECKSUM_BYTES: Final = 4
"""Number of bytes at the beginning of a record that hold the CRC of the rest."""
_WORD: Final = np.dtype("<u2")
_WORDS: Final = RECORD_BYTES // _WORD.itemsize
_FIRST_WORD: Final = _CHECKSUM_BYTES // _WORD.itemsize
_BLOCK_RECORDS: Final = 8192
"""Number of records per block, whose words stay in a processor's caches."""


def compute_record_checksums(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of each record of ``RECORD_BYTES`` without its leading checksum, shape (N,)."""
    words = np.ascontiguousarray(records).view(_WORD).reshape(-1, _WORDS)
    checksums = np.full(len(words), _crc_of_zeros(), dtype=np.uint32)
    tables = _tables() if len(words) else ()
    for begin in range(0, len(words), _BLOCK_RECORDS):
        some = checksums[begin : begin + _BLOCK_RECORDS]
        columns = np.ascontiguousarray(words[begin : begin + _BLOCK_RECORDS, _FIRST_WORD:].T)
        for table, column in zip(tables, columns, strict=True):
            some ^= table.take(column)
    return checksums


def _crc_of_zeros() -> int:
    return crc32(bytes(RECORD_BYTES - _CHECKSUM_BYTES))


@lru_cache(maxsize=1)
def _tables() -> npt.NDArray[np.uint32]:
    """Return the contribution to the CRC of each word, shape (words, values of a word).

    A value with several bits set is combined from smaller ones: the entry of 0b101 is that of 0b100 XOR that of 0b001.
    """
    bits = 8 * _WORD.itemsize
    tables = np.zeros((_WORDS - _FIRST_WORD, 1 << bits), dtype=np.uint32)
    for bit in range(bits):
        for index, table in enumerate(tables):
            message = bytearray(RECORD_BYTES - _CHECKSUM_BYTES)
            message[index * _WORD.itemsize + bit // 8] = 1 << bit % 8
            table[1 << bit : 2 << bit] = table[: 1 << bit] ^ np.uint32(crc32(message) ^ _crc_of_zeros())
    return tables
