"""Vectorized integrity check of the entries of a collective log, because logs are long."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.trace.group_log import ENTRY_BYTES, ENTRY_DTYPE, FAILED, REACHED, UNREACHED, Entries

_ADLER: Final = 65521
_CHECK_AT: Final = int(ENTRY_DTYPE.fields["check"][1])  # type: ignore[index]
_WEIGHTS: Final = np.arange(ENTRY_BYTES, 0, -1, dtype=np.float32)
"""Weight of each byte of an entry in the upper half of its Adler-32: its distance from the end. The upper half is the
weighted sum plus the number of bytes (bytes 3, 5: 2 * 3 + 1 * 5 + 2 = 13); below 2**24, so exact as float32."""
_WEIGHTS[_CHECK_AT : _CHECK_AT + 2] = 0
_UNFINISHED_UPDATES: Final = (
    (("completed_ns",), FAILED),
    (("launched_ns",), 0),
    (("completed_ns", "launched_ns"), FAILED),
    ((), REACHED),
    ((), UNREACHED),
)
"""Times and flags that may have been added to an entry since its check was last updated."""


def verify_entries(entries: Entries) -> tuple[Entries, npt.NDArray[np.bool_]]:
    """Return the entries in their last consistent state, and a mask of those that are intact.

    A process may die, be interrupted, or be read by others between an addition to an entry and the update of its check:
    such an addition is undone.
    """
    is_intact = _is_intact(entries)
    if is_intact.all():
        return entries, is_intact
    entries = entries.copy()
    for entry_index in np.flatnonzero(~is_intact):
        for times, flag in _UNFINISHED_UPDATES:
            before = entries[entry_index : entry_index + 1].copy()
            for name in times:
                before[name] = 0
            before["flags"] &= ~np.uint8(flag)
            if _is_intact(before)[0]:
                entries[entry_index], is_intact[entry_index] = before[0], True
                break
    return entries, is_intact


def _is_intact(entries: Entries) -> npt.NDArray[np.bool_]:
    data = np.frombuffer(entries.tobytes(), dtype=np.uint8).reshape(-1, ENTRY_BYTES)
    sums = (data.astype(np.float32) @ _WEIGHTS).astype(np.int64)
    is_intact: npt.NDArray[np.bool_] = (sums + ENTRY_BYTES) % _ADLER == entries["check"]
    return is_intact
