"""Compares this rank's collectives with a neighbour's while the job runs, by running sums: a few bytes a look.

The rank that is ahead looks up its own sums at the number where the other one stands. Equal sums are equal logs. If
they differ, the entries since the last agreement are asked for once, and the first that differs is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from overlapscope.diagnosis.evidence import Divergence
from overlapscope.trace.group_log import UNEVEN_INPUTS, UNKNOWN, Entries, GroupLog, mix, step_that_must_agree
from overlapscope.trace.signature import Signature

_MASK: Final = 2**64 - 1
_AT_ONCE: Final = 64
"""Entries read in one go: the training thread may wait for the log meanwhile."""
_LOOK_BACK: Final = 32
"""Names that were swapped may have been seen one by one."""
MOST_ENTRIES: Final = 2048
_MOST_TRANSLATIONS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Head:
    """How far a rank is in a group."""

    newest: int
    hash: int
    names_hash: int
    batch: int | None = None
    """Of the newest entry, if that is a bucket."""

    def to_plain(self) -> list[int | None]:
        """For JSON."""
        return [self.newest, self.hash, self.names_hash, self.batch]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Head:
        """What ``to_plain`` has made."""
        return cls(newest=plain[0], hash=plain[1], names_hash=plain[2], batch=plain[3])


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Somewhere in between two ranks begin to differ."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first entry that two ranks do not have in common."""

    number: int
    divergence: Divergence


@dataclass(frozen=True, kw_only=True)
class Item:
    """What is compared of an entry."""

    hash: int
    names: int
    """Of its signature alone: what its tensors are called."""
    step: int
    batch: int | None


def head_of(log: GroupLog, signatures: list[Signature]) -> Head | None:
    """Where this rank stands; None before the first entry."""
    entry = _read_one(log, log.newest)
    if entry is None:
        return None
    return Head(
        newest=int(entry["number"]),
        hash=int(entry["hash"]),
        names_hash=int(entry["names_hash"]),
        batch=_batch_of(entry, signatures),
    )


@dataclass
class Comparison:
    """What is known of one neighbour in one group.

    Args:
        log: this rank's.
        signatures: this rank's, by number - 1.
    """

    log: GroupLog
    signatures: list[Signature]
    agreed: int = 0
    """Number of the newest entry up to which nothing differs."""
    is_over: bool = False
    """They have been found to differ; all that follows differs as well."""
    _names: tuple[int, int] = (0, 0)
    """The sums of names, ours and the neighbour's, at ``agreed``."""
    _batches: tuple[int, int] | None = None
    """Ours and the neighbour's at the newest bucket that was compared."""
    _calls_it: dict[int, int] = field(default_factory=dict)
    """What the neighbour calls a tensor, by what we do, where that is no fault: ``if rank == 0: broadcast(a) ...``."""
    _compares_names: bool = True

    def look(self, theirs: Head) -> Suspicion | None:
        """Compare, if we are ahead; otherwise it is for the neighbour to do."""
        if self.is_over or not self.agreed < theirs.newest <= self.log.newest:
            return None
        ours = _read_one(self.log, theirs.newest)
        if ours is None:  # the ring has come round: they are too far behind to be compared here
            return None
        suspicion = Suspicion(first=max(1, self.agreed + 1 - _LOOK_BACK), last=theirs.newest)
        if int(ours["hash"]) != theirs.hash:
            return suspicion
        names = (int(ours["names_hash"]), theirs.names_hash)
        if self._compares_names and not self._names_are_as_expected(names, theirs.newest):
            return suspicion
        batches = _both(_batch_of(ours, self.signatures), theirs.batch)
        if batches is not None and _has_skipped(self._batches, batches) and not ours["flags"] & UNEVEN_INPUTS:
            return suspicion
        self._agree(theirs.newest, names, batches)
        return None

    def resolve(self, first: int, theirs: list[Item], until: Head) -> Difference | None:
        """Find out what a suspicion was about.

        Args:
            first: number of the first entry of ``theirs``.
            until: where the neighbour stood when the suspicion arose.

        Returns:
            None if the difference is harmless. It will be known again when it is met again.
        """
        ours = items_of(self.log, self.signatures, first, first + len(theirs) - 1)
        both = list(zip(ours, theirs, strict=False))
        difference = first_difference(first, both)
        if difference is not None:
            self.is_over = True
            return difference
        for mine, their in both:
            if mine.names != their.names:
                self._calls_it[mine.names] = their.names
        # With names that change all the time nothing can be learnt.
        self._compares_names = len(self._calls_it) <= _MOST_TRANSLATIONS
        ours_there = _read_one(self.log, until.newest)
        if ours_there is not None:
            self._agree(until.newest, (int(ours_there["names_hash"]), until.names_hash), None)
        return None

    def _agree(self, number: int, names: tuple[int, int], batches: tuple[int, int] | None) -> None:
        self.agreed, self._names = number, names
        if batches is not None:
            self._batches = batches

    def _names_are_as_expected(self, names: tuple[int, int], number: int) -> bool:
        """Whether what the neighbour has added to its sum is what we have, but for the names that may differ."""
        added = [(new - old) & _MASK for new, old in zip(names, self._names, strict=True)]
        if added[0] == added[1]:
            return True
        if not self._calls_it or number - self.agreed > MOST_ENTRIES:
            return False
        items = items_of(self.log, self.signatures, self.agreed + 1, number)
        expected = 0
        for place, item in enumerate(items, self.agreed + 1):
            name = self._calls_it.get(item.names, item.names)
            expected += mix(name, place, -1) if name else 0
        return expected & _MASK == added[1]


def items_of(log: GroupLog, signatures: list[Signature], first: int, last: int) -> list[Item]:
    """Entries of our own log, as they are compared; empty if the ring no longer has the first of them."""
    entries = read_gently(log, first, last)
    if not len(entries) or int(entries[0]["number"]) != first:
        return []
    items = []
    for entry in entries:
        number = int(entry["signature"])
        signature = signatures[number - 1] if 0 < number <= len(signatures) else None
        items.append(
            Item(
                hash=signature.hash if signature is not None else 0,
                names=signature.names_hash if signature is not None else 0,
                step=-1
                if signature is None
                else step_that_must_agree(signature, int(entry["step"]), int(entry["flags"])),
                batch=_batch_of(entry, signatures),
            )
        )
    return items


def first_difference(first: int, both: list[tuple[Item, Item]]) -> Difference | None:
    """Where two ranks begin to differ, and in what. Names alone are no fault unless they are swapped."""
    batches: tuple[int, int] | None = None
    swapped: dict[tuple[int, int], int] = {}
    for number, (ours, theirs) in enumerate(both, first):
        if ours.hash != theirs.hash:
            return Difference(number=number, divergence="signature")
        if ours.step != theirs.step:
            return Difference(number=number, divergence="step")
        now = _both(ours.batch, theirs.batch)
        if now is not None:
            if _has_skipped(batches, now):
                return Difference(number=number, divergence="batch")
            batches = now
        if ours.names != theirs.names:
            if (theirs.names, ours.names) in swapped:
                return Difference(number=swapped[theirs.names, ours.names], divergence="names")
            swapped.setdefault((ours.names, theirs.names), number)
    return None


def read_gently(log: GroupLog, first: int, last: int) -> Entries:
    """The entries of a log, with pauses in which others can use it."""
    parts = [
        log.read(start, min(start + _AT_ONCE - 1, last)) for start in range(first, min(last, log.newest) + 1, _AT_ONCE)
    ]
    return np.concatenate(parts) if parts else log.read(1, 0)


def _read_one(log: GroupLog, number: int) -> Any:
    entries = log.read(number, number)
    return entries[0] if len(entries) and int(entries[0]["number"]) == number else None


def _batch_of(entry: Any, signatures: list[Signature]) -> int | None:
    number, batch = int(entry["signature"]), int(entry["batch"])
    is_bucket = 0 < number <= len(signatures) and signatures[number - 1].role == "bucket"
    return batch if is_bucket and batch != UNKNOWN and not int(entry["flags"]) & UNEVEN_INPUTS else None


def _both(ours: int | None, theirs: int | None) -> tuple[int, int] | None:
    return None if ours is None or theirs is None else (ours, theirs)


def _has_skipped(before: tuple[int, int] | None, now: tuple[int, int]) -> bool:
    """One rank has gone further in its data than the other. Who begins anew, as in each epoch, may be anywhere."""
    if before is None or now[0] < before[0] or now[1] < before[1]:
        return False
    return now[0] - before[0] != now[1] - before[1]
