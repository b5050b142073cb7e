"""Which entries of a collective log are what was written: all of them at once, because logs are long."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.trace.group_log import ENTRY_BYTES, ENTRY_DTYPE, FAILED, REACHED, UNREACHED, Entries

_ADLER: Final = 65521
_CHECK_AT: Final = int(ENTRY_DTYPE.fields["check"][1])  # type: ignore[index]
_WEIGHTS: Final = np.arange(ENTRY_BYTES, 0, -1, dtype=np.float32)
"""The upper half of Adler-32 is the sum of all bytes, each times its distance from the end: below 2**24, so exact."""
_WEIGHTS[_CHECK_AT : _CHECK_AT + 2] = 0
_ADDED: Final = (
    (("completed_ns",), FAILED),
    (("launched_ns",), 0),
    (("completed_ns", "launched_ns"), FAILED),
    ((), REACHED),
    ((), UNREACHED),
)
"""What may just have been added to an entry: times, and flags."""


def checked(entries: Entries) -> tuple[Entries, npt.NDArray[np.bool_]]:
    """Entries as they were last written completely, and which of them are that.

    A process may die, be interrupted, or be looked at between what it adds to an entry and the new check: that is taken
    out.
    """
    is_intact = _is_intact(entries)
    if is_intact.all():
        return entries, is_intact
    entries = entries.copy()
    for place in np.flatnonzero(~is_intact):
        for times, flag in _ADDED:
            before = entries[place : place + 1].copy()
            for name in times:
                before[name] = 0
            before["flags"] &= ~np.uint8(flag)
            if _is_intact(before)[0]:
                entries[place], is_intact[place] = before[0], True
                break
    return entries, is_intact


def _is_intact(entries: Entries) -> npt.NDArray[np.bool_]:
    data = np.frombuffer(entries.tobytes(), dtype=np.uint8).reshape(-1, ENTRY_BYTES)
    sums = (data.astype(np.float32) @ _WEIGHTS).astype(np.int64)
    is_intact: npt.NDArray[np.bool_] = (sums + ENTRY_BYTES) % _ADLER == entries["check"]
    return is_intact
