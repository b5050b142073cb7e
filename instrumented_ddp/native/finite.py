"""A look at some elements of gradients, where they lie: whether these are NaN or infinite."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

WHOLE: Final = 1024
"""Value of ``share`` for whole diagonals."""

_EXPONENTS: Final = (("u2", 0x7C00), ("u2", 0x7F80), ("u4", 0x7F800000), ("u8", 0x7FF0000000000000))
"""By kind of element, integers of that size, and the bits of the exponent: all set in NaN and infinity alone."""


class FiniteProbe:
    """Looks at elements on the diagonals of gradients that lie in one buffer.

    A diagonal begins anew at the edges of its matrix: with 3 rows and 4 columns it visits (0, 0), (1, 1), (2, 2) and
    (0, 3). So it crosses all rows and columns, one of which a NaN fills in the layer where it comes from.

    Args:
        kind: of the elements; 0: float16, 1: bfloat16, 2: float32, 3: float64.
        gradients: first element, rows and columns of each.
    """

    def __init__(self, kind: int, gradients: Sequence[tuple[int, int, int]]) -> None:
        if not 0 <= kind < len(_EXPONENTS):
            raise ValueError("no such kind of element")
        if any(start < 0 or rows < 1 or columns < 1 for start, rows, columns in gradients):
            raise ValueError("no such gradient")
        dtype, self._exponent = _EXPONENTS[kind]
        self._dtype = np.dtype(dtype)
        self._gradients = tuple(gradients)
        self._end = max((start + rows * columns for start, rows, columns in gradients), default=0)
        self._mapped_at = 0
        self._elements: npt.NDArray[np.unsignedinteger] = np.empty(0, self._dtype)

    def is_finite(self, address: int, turn: int, share: int) -> bool:
        """Return whether the elements that have their turn are finite.

        Args:
            address: of the buffer.
            turn: number of the pass; consecutive ones look at consecutive parts of a diagonal.
            share: how much of each diagonal is looked at, beside one element; ``WHOLE`` for all of it.
        """
        if address != self._mapped_at:
            memory = (ctypes.c_char * (self._end * self._dtype.itemsize)).from_address(address)
            self._elements, self._mapped_at = np.frombuffer(memoryview(memory), self._dtype), address
        share = min(max(share, 0), WHOLE)
        places = [_places(one, turn, share) for one in self._gradients]
        taken = self._elements[np.concatenate(places)] if places else self._elements[:0]
        return not bool(((taken & self._exponent) == self._exponent).any())


def _places(gradient: tuple[int, int, int], turn: int, share: int) -> npt.NDArray[np.int64]:
    start, rows, columns = gradient
    length = max(rows, columns)
    looks = min(share * length // WHOLE + 1, length)
    steps = (turn * looks + np.arange(looks)) % length
    return start + steps % rows * columns + steps % columns
