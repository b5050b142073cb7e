"""Arrival times of ranks at collectives, and the occurrence numbers by which events of several ranks are matched."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Int64s = npt.NDArray[np.int64]


def occurrence_index(*columns: npt.NDArray[Any]) -> Int64s:
    """Count for each row how many rows before it are equal in all columns.

    Example: 3, 5, 3, 3, 5 gives 0, 0, 1, 2, 1. The same as ``cumcount`` of a pandas ``groupby``.
    """
    order = np.lexsort(columns)
    occurrence = np.empty(len(order), dtype=np.int64)
    occurrence[order] = index_in_runs(*(column[order] for column in columns))
    return occurrence


def index_in_runs(*columns: npt.NDArray[Any]) -> Int64s:
    """Return each row's index in its run of adjacent rows that are equal in all columns.

    Example: 7, 7, 4, 4, 4, 7 gives 0, 1, 0, 1, 2, 0.
    """
    begins = np.ones(len(columns[0]), dtype=bool)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(begins)))
    return np.arange(len(begins)) - np.repeat(first, lengths)


def compute_arrival_ns(collectives: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return when each collective was both launched by the host and ready on its device, shape (N,).

    A host runs ahead of its device, by more than a step if nothing stops it, so the launch time alone says little. The
    start on the device is used only for collectives that wait for no bucket, such as those of buffers: a bucket may be
    ready long before the one ahead of it has completed.
    """
    began_ns = collectives["ready_ns"].fillna(collectives["start_ns"]).to_numpy(np.int64, na_value=0)
    return np.maximum(collectives["launch_ns"].to_numpy(np.int64), began_ns)
