"""First difference in the order of collectives, for each process group.

Each rank is compared with the one whose log goes furthest. Their running hashes are equal up to an entry if and only if
all entries up to there agree, so bisection finds the first difference with a few reads. Only if that, or the ends of
the common range, call for it, are entries compared one by one (``difference``).

Example: of entries 1 to 100, of which 1 to 36 agree, bisection probes 100, 50, 25, 37, 31, 34, 35 and 36: eight probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import numpy as np

from overlapscope.diagnosis.evidence import UNKNOWN_OP, CallSite, Entry, GroupOrder
from overlapscope.diagnosis.order_difference import (
    Compared,
    EntryDifference,
    align_entries,
    are_apart_before,
    compute_offsets,
    extract_compared,
    find_first_difference,
    find_first_mismatch,
)
from overlapscope.trace.collective_log import (
    UNEVEN_INPUTS,
    UNKNOWN,
    Entries,
    ProcessGroup,
    Signature,
    find_earlier_steps,
    oldest_incomplete,
)
from overlapscope.trace.collective_log_reader import CollectiveLogs
from overlapscope.trace.schema import Phase

# Interfaces that read the order of collectives a few entries at a time: from logs, or dumps of another tool.


class OrderSource(Protocol):
    """The collectives of all ranks by group and number, with random access to a few of them."""

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each sorted by name."""
        ...

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that left entries, in order."""
        ...

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest entry that is left; 1 if there is none."""
        ...

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry; 0 if there is none."""
        ...

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        ...

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if the latest is completed."""
        ...


@runtime_checkable
class RunningHashes(OrderSource, Protocol):
    """A source whose entries hold running hashes, so that comparing one entry compares all entries up to it."""

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the entries as an array of ``overlapscope.trace.collective_log.ENTRY_DTYPE``."""
        ...

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        ...

    def steps_before(self, group: ProcessGroup, rank: int, number: int) -> tuple[int, ...]:
        """Return the steps of the last entries before this one that have its signature and line, in order."""
        ...


# Decoder from rows of a collective log to ``Entry`` objects.

UNKNOWN_SIGNATURE: Final = Signature(op=UNKNOWN_OP)
"""Signature of an entry whose line in ``signatures.jsonl`` is lost."""

_PHASES: Final = {phase.value: phase.name.lower() for phase in Phase} | {Phase.DATA_WAIT.value: "loop"}
"""Names of the phases, by number; a wait for data is part of the loop between steps."""


def decode_entries(
    rows: Iterable[Sequence[int]], signatures: Mapping[int, Signature], call_sites: Mapping[int, CallSite]
) -> tuple[Entry, ...]:
    """Decode entries of a live log or of a file.

    Args:
        rows: fields as in ``collective_log.ENTRY_FIELDS``.
        signatures: signatures of this rank, by number.
        call_sites: call sites of this rank, by number.
    """
    return tuple(
        Entry(
            number=number,
            signature=signatures.get(signature, UNKNOWN_SIGNATURE),
            step=step,
            # Inside join() ranks may be anywhere in their data, and a rank that has joined is at no batch at all.
            batch=None if batch == UNKNOWN or flags & UNEVEN_INPUTS else batch,
            phase=phase_name(phase),
            call_site=call_sites.get(call_site),
            flags=flags,
            announced_ns=announced_ns,
            launched_ns=launched_ns or None,
            completed_ns=completed_ns or None,
        )
        for (
            number,
            signature,
            call_site,
            step,
            batch,
            phase,
            flags,
            _,
            _,
            _,
            announced_ns,
            launched_ns,
            completed_ns,
        ) in rows
    )


def phase_name(phase: int) -> str | None:
    """Return the name of a phase in evidence; None outside a training step and for an unknown number."""
    return _PHASES.get(phase)


# Order of collectives from the collective logs of a recording.


class RecordedOrder:
    """The collective logs of a recording as an ``OrderSource`` with running hashes."""

    def __init__(self, logs: CollectiveLogs) -> None:
        self.logs = logs
        self._files = dict(sorted(logs.groups.items(), key=lambda item: item[0].order))
        self._call_sites: dict[int, dict[int, CallSite]] = {}

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each sorted by name."""
        return tuple(self._files)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that left entries, in order."""
        return tuple(sorted(rank for rank, file in self._files[group].items() if file.latest))

    def groups_of(self, rank: int) -> tuple[ProcessGroup, ...]:
        """Return the groups in which a rank left entries."""
        return tuple(group for group, files in self._files.items() if rank in files)

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest entry that is left; 1 if there is none."""
        file = self._files[group].get(rank)
        return file.oldest if file else 1

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry; 0 if there is none."""
        file = self._files[group].get(rank)
        return file.latest if file else 0

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        rows = self.columns(group, rank, first, last)
        if not len(rows):
            return ()
        signatures = self.signatures(rank)
        used = set(rows["signature"].tolist())
        named = {number: self.logs.named(rank, signatures[number]) for number in used if number in signatures}
        return decode_entries(rows.tolist(), named, self.call_sites(rank))

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if the latest is completed."""
        file = self._files[group].get(rank)
        numbers = [] if file is None else oldest_incomplete(file)["number"].tolist()
        return next((entry for number in numbers for entry in self.entries(group, rank, number, number)), None)

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the entries with the numbers ``first`` to ``last``, as an array of ``ENTRY_DTYPE``."""
        file = self._files[group].get(rank)
        return file.read(first, last) if file else np.empty(0, dtype=np.dtype([]))

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        return self.logs.signatures(rank)

    def steps_before(self, group: ProcessGroup, rank: int, number: int) -> tuple[int, ...]:
        """Return the steps of the last entries before this one that have its signature and line, in order."""
        file = self._files[group].get(rank)
        return find_earlier_steps(file, number) if file else ()

    def call_sites(self, rank: int) -> Mapping[int, CallSite]:
        """Return a rank's call sites by number."""
        if rank not in self._call_sites:
            self._call_sites[rank] = {
                number: CallSite(file=file, line=line, function=function)
                for number, (file, line, function) in self.logs.call_sites(rank).items()
            }
        return self._call_sites[rank]

    def newest_of(self, rank: int) -> Entry | None:
        """Return the last entry of a rank in any group."""
        latest: list[Entry] = []
        for group in self.groups_of(rank):
            number = self.latest(group, rank)
            latest += self.entries(group, rank, number, number)
        return max(latest, key=lambda entry: entry.announced_ns, default=None)


WINDOW_MARGIN: Final = 6
"""Number of entries of a window before and after the first difference."""

_LONGEST_WINDOW: Final = 64
_END_ENTRIES: Final = 64
_NOTHING: Final[Mapping[str, EntryDifference]] = MappingProxyType({})


def compare_orders(source: RunningHashes, known: Mapping[str, EntryDifference] = _NOTHING) -> tuple[GroupOrder, ...]:
    """Return the order of collectives in each group.

    Args:
        known: first differences that were found before, by name of the group.
    """
    return tuple(
        make_group_order(source, group, known[group.name]) if group.name in known else compare_order(source, group)
        for group in source.groups()
        if not group.is_point_to_point
    )


def read_point_to_point_orders(source: OrderSource) -> tuple[GroupOrder, ...]:
    """Return the latest sends and receives: only these, because each rank numbers its own."""
    return tuple(make_group_order(source, group, None) for group in source.groups() if group.is_point_to_point)


def compare_order(source: RunningHashes, group: ProcessGroup) -> GroupOrder:
    """Return the order of collectives in one group."""
    ranks = source.recorded(group)
    if not ranks:
        return make_group_order(source, group, None)
    reference, entries = max(ranks, key=lambda rank: (source.latest(group, rank), -rank)), _GroupEntries(source, group)
    found = [
        difference
        for rank in ranks
        if rank != reference and (difference := _find_difference(entries, reference, rank)) is not None
    ]
    return make_group_order(source, group, min(found, key=lambda one: one.order, default=None))


def make_group_order(source: OrderSource, group: ProcessGroup, difference: EntryDifference | None) -> GroupOrder:
    """Return the entries of a group's ranks around their first difference; without one, their latest entries."""
    latest = {rank: source.latest(group, rank) for rank in source.recorded(group)}
    windows: dict[int, tuple[Entry, ...]] = {}
    for rank, its_newest in latest.items():
        if difference:
            first, last = difference.number - WINDOW_MARGIN, difference.number + WINDOW_MARGIN
        else:
            # Starts before the first entry that some rank has not reached.
            last = its_newest
            first = its_newest - _LONGEST_WINDOW
            if not group.is_point_to_point:  # sends and receives are numbered by each rank separately
                first = max(min(latest.values()) - WINDOW_MARGIN, first)
        windows[rank] = source.entries(group, rank, first, last)
    is_open = [] if difference else [rank for rank, window in windows.items() if not _is_over(window)]
    oldest_incomplete = {rank: source.oldest_incomplete(group, rank) for rank in is_open}
    return GroupOrder(
        name=group.name,
        ranks=group.ranks,
        description=group.description,
        backend=group.backend,
        latest=latest,
        first_divergence=difference.number if difference else None,
        divergence=difference.divergence if difference else None,
        predates_log=difference.predates_log if difference else False,
        windows=windows,
        steps_before=_find_steps_before(source, group, difference.number) if difference else {},
        oldest_incomplete={rank: entry for rank, entry in oldest_incomplete.items() if entry is not None},
    )


def _find_steps_before(source: OrderSource, group: ProcessGroup, number: int) -> dict[int, tuple[int, ...]]:
    if not isinstance(source, RunningHashes):
        return {}
    found = {rank: source.steps_before(group, rank, number) for rank in source.recorded(group)}
    return {rank: steps for rank, steps in found.items() if steps}


def _is_over(window: Sequence[Entry]) -> bool:
    return bool(window) and window[-1].state == "completed"


class _GroupEntries:
    """Entries of one group, which are read once: all ranks are compared with the same one."""

    def __init__(self, source: RunningHashes, group: ProcessGroup) -> None:
        self.source = source
        self.group = group
        self.columns = cache(partial(source.columns, group))
        """Function that returns the entries of a rank between two numbers."""
        self.compared = cache(self._extract_compared)
        """Function that returns the compared fields of these."""

    def _extract_compared(self, rank: int, first: int, last: int) -> Compared:
        return extract_compared(self.columns(rank, first, last), self.source.signatures(rank))


def _find_difference(entries: _GroupEntries, a: int, b: int) -> EntryDifference | None:
    """Find the first difference between two ranks among the entries that both have written and still have."""
    pair = _Pair(entries, a, b)
    if pair.first > pair.last:
        return None
    agreed, other = pair.bisect()
    if other is not None and agreed < pair.first > 1:
        left = find_first_mismatch(*pair.compared(other, pair.last))
        return EntryDifference(number=other, divergence=left.divergence if left else None, predates_log=True)
    end = pair.last if other is None else other - 1
    if not pair.is_alike(end):
        difference = find_first_difference(*pair.compared(pair.first, other or end))
    elif other is not None:
        difference = find_first_difference(*pair.compared(other, other))
    else:
        return None
    if difference is None and other is not None:  # the lines that describe the collectives are lost
        return EntryDifference(number=other, divergence="signature")
    if difference is not None and pair.first > 1:
        oldest = pair.compared(pair.first, pair.first)
        return replace(difference, predates_log=are_apart_before(*oldest, difference.number))
    return difference


class _Pair:
    """Two ranks of a group, and the range of entries that both have."""

    def __init__(self, entries: _GroupEntries, a: int, b: int) -> None:
        self.entries, self.a, self.b = entries, a, b
        source, group = entries.source, entries.group
        self.first = max(source.oldest(group, a), source.oldest(group, b))
        self.last = min(source.latest(group, a), source.latest(group, b))

    def compared(self, first: int, last: int) -> tuple[Compared, Compared]:
        """Return the compared fields of the entries in a range that both have."""
        return align_entries(*(self.entries.compared(rank, first, last) for rank in (self.a, self.b)))

    def bisect(self) -> tuple[int, int | None]:
        """Return the last entry up to which both ranks agree, and the next one, which differs; None if none does."""
        low, high = self.first - 1, self.last + 1
        latest = self._nearest_to(self.last, low, high)
        if latest is None or self._agree_at(latest):
            return self.last, None
        high = latest
        # Invariant: they agree at low, before which there is nothing, and not at high.
        while (middle := self._nearest_to((low + high) // 2, low, high)) is not None:
            low, high = (middle, high) if self._agree_at(middle) else (low, middle)
        return low, high

    def is_alike(self, end: int) -> bool:
        """Return True if the ends of a range with equal hashes show that batches, steps and names agree as well."""
        if self.first > end:
            return True
        early, late = (self.first, min(end, self.first + _END_ENTRIES)), (max(self.first, end - _END_ENTRIES), end)
        return _keep_offset(self.compared(*early), self.compared(*late)) and self._names_agree(early, late)

    def _names_agree(self, early: tuple[int, int], late: tuple[int, int]) -> bool:
        """Return True if names are the same from the first entry of one range to the last entry of another one."""
        ranks = self.a, self.b
        rows = [(self.entries.columns(r, *early)[:1], self.entries.columns(r, *late)[-1:]) for r in ranks]
        ends = [early[0], late[1]]
        if any([number for one in of_rank for number in one["number"].tolist()] != ends for of_rank in rows):
            return False
        first_a, first_b = (self.entries.compared(r, *early)["names"][0] for r in ranks)
        since = [(last["names_hash"] - first["names_hash"])[0] for first, last in rows]
        return bool(first_a == first_b and since[0] == since[1])

    def _nearest_to(self, number: int, low: int, high: int) -> int | None:
        """Return the entry that both still have, nearest to ``number``, between ``low`` and ``high`` (exclusive)."""
        for one in chain(range(number, low, -1), range(number + 1, high)):
            if all(len(self.entries.columns(rank, one, one)) for rank in (self.a, self.b)):
                return one
        return None

    def _agree_at(self, number: int) -> bool:
        """Return True if the hashes of an entry that both have are equal."""
        a, b = (self.entries.columns(rank, number, number) for rank in (self.a, self.b))
        return bool(a["hash"][0] == b["hash"][0])


def _keep_offset(early: tuple[Compared, Compared], late: tuple[Compared, Compared]) -> bool:
    """Return True if one rank is as far ahead at the end as at the beginning: in batches; without buckets, in steps."""
    position = "batch" if any(a["is_bucket"].any() for a, _ in (early, late)) else "step"
    (_, _, before), (_, _, after) = (compute_offsets(*both, position) for both in (early, late))
    return bool(len(before) and len(after) and before[0] == after[-1])
