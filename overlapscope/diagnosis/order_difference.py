"""First difference between the collectives of two ranks, entry by entry: one rule for live logs and files.

Two ranks differ where they launched different collectives, or where a bucket belongs to different steps. Up to that
point, two things may legitimately vary:

- *Batches* may be numbered differently by each rank, so the offset between the ranks is compared. Only an offset that
  changes permanently is a skipped batch: a rank that reads other data for a while, such as a validation set, returns
  to the old offset. Where a rank restarts its data, as with epochs of unequal length, nothing is compared. In a group
  without buckets, steps are compared in the same way. Example: batches 0 1 2 3 4 and 0 1 3 4 5 have the offsets
  0 0 1 1 1, so the ranks differ from the third entry on; 0 1 7 3 4 has 0 0 5 0 0 and does not count.
- *Names* may differ because ranks label a tensor differently. They are swapped if the name that one rank has at an
  entry appears nearby on the other rank, where the first one has a different name, and vice versa. Example: names
  a b c and b a c are swapped at the first entry; a b c and x b c are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.diagnosis.evidence import Divergence
from overlapscope.trace.collective_log import UNEVEN_INPUTS, UNKNOWN, Entries, Signature

NO_POSITION: Final = -1
"""Value of ``step`` and ``batch`` if they carry no information: unknown, or launched inside ``join()``."""

COMPARED_DTYPE: Final = np.dtype(
    [
        ("number", "<i8"),
        ("signature", "<u8"),
        ("names", "<u8"),
        ("step", "<i8"),
        ("batch", "<i8"),
        ("is_bucket", "?"),
    ]
)
"""Compared fields of an entry: hashes of the signature and of the tensor names (0 if unknown), step and batch.

Only buckets have a batch.
"""

_WHAT_DTYPE: Final = np.dtype([("signature", "<u8"), ("names", "<u8"), ("is_bucket", "?")])

Compared = npt.NDArray[Any]
"""A structured array of ``COMPARED_DTYPE``, sorted by number."""

MAX_SWAP_DISTANCE: Final = 6
"""Maximum distance between swapped names, in entries."""
_MIN_LASTING_ENTRIES: Final = 3
"""Minimum number of entries that are a step apart: a single one may just lie at the border of two steps."""
_SEVERITY: Final[tuple[Divergence | None, ...]] = ("signature", "step", "batch", "names", None)


@dataclass(frozen=True, kw_only=True)
class EntryDifference:
    """The first entry at which two ranks differ."""

    number: int
    divergence: Divergence | None
    """Kind of the difference; None if it predates what is left of the logs, and what is left does not show it."""
    predates_log: bool = False
    """True if ranks differ, or may differ, since before the entries that were compared."""

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key by which the least of several differences is the first."""
        return self.number, _SEVERITY.index(self.divergence)


def extract_compared(rows: Entries, signatures: Mapping[int, Signature]) -> Compared:
    """Extract the compared fields from some entries of one rank.

    Args:
        signatures: signatures of this rank, by number.
    """
    numbers, inverse = np.unique(rows["signature"], return_inverse=True)
    known = [signatures.get(number) for number in numbers.tolist()]
    what = [(0, 0, False) if one is None else (one.hash, one.names_hash, one.is_gradient_reduction) for one in known]
    found = np.empty(len(rows), dtype=COMPARED_DTYPE)
    found[["signature", "names", "is_bucket"]] = np.array(what, dtype=_WHAT_DTYPE)[inverse]
    found["number"] = rows["number"]
    is_even = (rows["flags"] & UNEVEN_INPUTS) == 0
    found["step"] = np.where(is_even, rows["step"].astype(np.int64), NO_POSITION)
    has_batch = is_even & found["is_bucket"] & (rows["batch"] != UNKNOWN)
    found["batch"] = np.where(has_batch, rows["batch"].astype(np.int64), NO_POSITION)
    return found


def find_first_difference(a: Compared, b: Compared) -> EntryDifference | None:
    """Find the first difference between two ranks among the entries that both have; None if there is none."""
    a, b = align_entries(a, b)
    found = [find_first_mismatch(a, b)]
    if found[0] is not None:
        a, b = (rows[rows["number"] < found[0].number] for rows in (a, b))
    found += [_first_skipped(a, b), _first_swapped(a, b)]
    return min((one for one in found if one is not None), key=lambda one: one.order, default=None)


def find_first_mismatch(a: Compared, b: Compared) -> EntryDifference | None:
    """Find the first entry with different signatures, or the first bucket with different steps, of aligned entries."""
    is_known = (a["signature"] != 0) & (b["signature"] != 0)
    is_other = is_known & (a["signature"] != b["signature"])
    (indices,) = np.nonzero(is_other | (a["is_bucket"] & (a["step"] != b["step"])))
    if not len(indices):
        return None
    return EntryDifference(
        number=int(a["number"][indices[0]]), divergence="signature" if is_other[indices[0]] else "step"
    )


def align_entries(a: Entries, b: Entries) -> tuple[Entries, Entries]:
    """Return the entries, or their compared fields, whose numbers both ranks have."""
    if len(a) == len(b) and (a["number"] == b["number"]).all():
        return a, b
    _, in_a, in_b = np.intersect1d(a["number"], b["number"], return_indices=True)
    return a[in_a], b[in_b]


def compute_offsets(a: Compared, b: Compared, position: str) -> tuple[Compared, Compared, npt.NDArray[np.int64]]:
    """Return the entries whose ``batch`` or ``step`` both ranks know, and how far the second rank is ahead at each."""
    is_known = (a[position] != NO_POSITION) & (b[position] != NO_POSITION)
    a, b = a[is_known], b[is_known]
    return a, b, b[position] - a[position]


def are_apart_before(a: Compared, b: Compared, number: int) -> bool:
    """Return whether two ranks are in different steps already at the first entry, if that is before ``number``.

    With buckets these would be the first difference.
    """
    if not len(a) or a["number"][0] >= number or a["is_bucket"].any():
        return False
    _, _, ahead = compute_offsets(a[:1], b[:1], "step")
    return bool(ahead.any())


def _first_skipped(a: Compared, b: Compared) -> EntryDifference | None:
    """Find where one rank advanced in its data (without buckets: in its steps) and the other did not."""
    position: Divergence = "batch" if a["is_bucket"].any() else "step"
    a, b, ahead = compute_offsets(a, b, position)
    if not len(ahead) or ahead[0] == ahead[-1]:
        return None
    begins_anew = (np.diff(a[position]) < 0) | (np.diff(b[position]) < 0)
    lasting = ahead[0] + np.concatenate([[0], np.cumsum(np.where(begins_anew, 0, np.diff(ahead)))])
    if lasting[0] == lasting[-1]:
        return None
    changed = int(np.flatnonzero(lasting == lasting[0])[-1]) + 1
    if position == "step" and len(a) - changed < _MIN_LASTING_ENTRIES:
        return None
    return EntryDifference(number=int(a["number"][changed]), divergence=position)


def _first_swapped(a: Compared, b: Compared) -> EntryDifference | None:
    names_a, names_b, kinds = a["names"], b["names"], a["signature"]
    is_swapped = (
        _appears_nearby(names_a, names_b, kinds) & _appears_nearby(names_b, names_a, kinds) & (names_a != names_b)
    )
    (indices,) = np.nonzero(is_swapped)
    return EntryDifference(number=int(a["number"][indices[0]]), divergence="names") if len(indices) else None


def _appears_nearby(
    mine: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64], kinds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Mark entries whose name in ``mine`` is in ``theirs`` nearby, same signature, where ``mine`` has another name."""
    found = np.zeros(len(mine), dtype=bool)
    for distance in range(1, min(MAX_SWAP_DISTANCE, len(mine) - 1) + 1):
        before, after = slice(None, -distance), slice(distance, None)
        for here, there in ((before, after), (after, before)):
            found[here] |= (mine[here] == theirs[there]) & (mine[there] != mine[here]) & (kinds[here] == kinds[there])
    return found & (mine != 0)
