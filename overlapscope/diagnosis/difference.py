"""Where two ranks begin to differ, entry by entry: one rule, for logs that are being written and for files.

Ranks differ where they have not launched the same, or where a bucket is of another step. Before that they may differ
in what need not be the same:

- *Batches* may be numbered differently by each rank, so what counts is their difference. Only one that does not come
  back is a skipped batch: a rank that looks at other data for a while, such as a validation set, comes back. Where a
  rank begins its data anew, as with epochs of another length than the others', nothing is compared. In a group without
  buckets it is steps that are compared like this.
- *Names* may differ because ranks call a tensor differently. They are swapped if what one rank has here, the other one
  has near by, where the first has something else, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.diagnosis.evidence import Divergence
from overlapscope.trace.group_log import UNEVEN_INPUTS, UNKNOWN, Entries
from overlapscope.trace.signature import Signature

NOWHERE: Final = -1
"""``step`` and ``batch`` where they say nothing: nobody knows them, or it was launched inside ``join()``."""

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
"""What is compared of an entry: hashes of what must agree and of what the tensors are called, 0 if nobody knows; a
batch is a bucket's."""

_WHAT_DTYPE: Final = np.dtype([("signature", "<u8"), ("names", "<u8"), ("is_bucket", "?")])

Compared = npt.NDArray[Any]
"""A structured array of ``COMPARED_DTYPE``, by number."""

NEAR: Final = 6
"""How far names that are swapped may be apart."""
_LASTING: Final = 3
"""So many entries have to be a step apart, where a single one may just lie at the border of two steps."""
_SEVERITY: Final[tuple[Divergence | None, ...]] = ("signature", "step", "batch", "names", None)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first entry that two ranks do not have in common."""

    number: int
    divergence: Divergence | None
    """None: it lies before what is left, and what is left does not say what it was."""
    is_since_before: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """The first of several differences is the least."""
        return self.number, _SEVERITY.index(self.divergence)


def compared(rows: Entries, signatures: Mapping[int, Signature]) -> Compared:
    """What is compared of some entries of one rank.

    Args:
        signatures: by number, those of this rank.
    """
    numbers, place = np.unique(rows["signature"], return_inverse=True)
    known = [signatures.get(number) for number in numbers.tolist()]
    what = [(0, 0, False) if one is None else (one.hash, one.names_hash, one.is_of_gradients) for one in known]
    found = np.empty(len(rows), dtype=COMPARED_DTYPE)
    found[["signature", "names", "is_bucket"]] = np.array(what, dtype=_WHAT_DTYPE)[place]
    found["number"] = rows["number"]
    is_even = (rows["flags"] & UNEVEN_INPUTS) == 0
    found["step"] = np.where(is_even, rows["step"].astype(np.int64), NOWHERE)
    has_batch = is_even & found["is_bucket"] & (rows["batch"] != UNKNOWN)
    found["batch"] = np.where(has_batch, rows["batch"].astype(np.int64), NOWHERE)
    return found


def first_difference(a: Compared, b: Compared) -> Difference | None:
    """Where two ranks differ first among the entries that both have, if they do."""
    a, b = in_common(a, b)
    found = [first_mismatch(a, b)]
    if found[0] is not None:
        a, b = (rows[rows["number"] < found[0].number] for rows in (a, b))
    found += [_first_skipped(a, b), _first_swapped(a, b)]
    return min((one for one in found if one is not None), key=lambda one: one.order, default=None)


def first_mismatch(a: Compared, b: Compared) -> Difference | None:
    """Where two ranks have first launched something else, or a bucket of another step, among the same entries."""
    is_known = (a["signature"] != 0) & (b["signature"] != 0)
    is_other = is_known & (a["signature"] != b["signature"])
    (places,) = np.nonzero(is_other | (a["is_bucket"] & (a["step"] != b["step"])))
    if not len(places):
        return None
    return Difference(number=int(a["number"][places[0]]), divergence="signature" if is_other[places[0]] else "step")


def in_common(a: Entries, b: Entries) -> tuple[Entries, Entries]:
    """The entries, or what is compared of them, that both ranks have."""
    if len(a) == len(b) and (a["number"] == b["number"]).all():
        return a, b
    _, in_a, in_b = np.intersect1d(a["number"], b["number"], return_indices=True)
    return a[in_a], b[in_b]


def how_far_ahead(a: Compared, b: Compared, position: str) -> tuple[Compared, Compared, npt.NDArray[np.int64]]:
    """Entries of which both ranks know the position (``batch`` or ``step``), and how far the second is ahead there."""
    is_known = (a[position] != NOWHERE) & (b[position] != NOWHERE)
    a, b = a[is_known], b[is_known]
    return a, b, b[position] - a[position]


def _first_skipped(a: Compared, b: Compared) -> Difference | None:
    """Where one rank has gone on in its data, or without buckets in its steps, and the other has not."""
    position: Divergence = "batch" if a["is_bucket"].any() else "step"
    a, b, ahead = how_far_ahead(a, b, position)
    if not len(ahead) or ahead[0] == ahead[-1]:
        return None
    begins_anew = (np.diff(a[position]) < 0) | (np.diff(b[position]) < 0)
    lasting = ahead[0] + np.concatenate([[0], np.cumsum(np.where(begins_anew, 0, np.diff(ahead)))])
    if lasting[0] == lasting[-1]:
        return None
    changed = int(np.flatnonzero(lasting == lasting[0])[-1]) + 1
    if position == "step" and len(a) - changed < _LASTING:
        return None
    return Difference(number=int(a["number"][changed]), divergence=position)


def _first_swapped(a: Compared, b: Compared) -> Difference | None:
    names_a, names_b, kinds = a["names"], b["names"], a["signature"]
    is_swapped = _turns_up(names_a, names_b, kinds) & _turns_up(names_b, names_a, kinds) & (names_a != names_b)
    (places,) = np.nonzero(is_swapped)
    return Difference(number=int(a["number"][places[0]]), divergence="names") if len(places) else None


def _turns_up(
    mine: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64], kinds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Where a name of mine is theirs near by, for a collective of the same kind, in a place where I have another."""
    found = np.zeros(len(mine), dtype=bool)
    for distance in range(1, min(NEAR, len(mine) - 1) + 1):
        before, after = slice(None, -distance), slice(distance, None)
        for here, there in ((before, after), (after, before)):
            found[here] |= (mine[here] == theirs[there]) & (mine[there] != mine[here]) & (kinds[here] == kinds[there])
    return found & (mine != 0)
