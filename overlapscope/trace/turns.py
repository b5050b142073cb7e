"""Numbering of equal rows: which one of its kind, from 0, each row of a table is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def turns(*columns: npt.NDArray[Any]) -> Int64s:
    """For each row, how many rows before it are equal in all columns."""
    order = np.lexsort(columns)
    turn = np.empty(len(order), dtype=np.int64)
    turn[order] = places_in_runs(*(column[order] for column in columns))
    return turn


def places_in_runs(*columns: npt.NDArray[Any]) -> Int64s:
    """Each row's place, from 0, in its run of neighbours that are equal in all columns."""
    begins = np.ones(len(columns[0]), dtype=bool)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(begins)))
    return np.arange(len(begins)) - np.repeat(first, lengths)
