"""Comparison of this rank's collectives and replicas with its neighbors' while the job runs.

Each rank compares with its two neighbors in the ring of each group, whatever the size of the job; as equality is
transitive, all ranks of a group are compared. Logs are compared by running hashes of a few bytes: the rank that is
ahead looks up its own hashes at the entry number that the other one has reached. Equal hashes are equal logs. If they
differ, the entries since the last agreement are requested once, in the next heartbeat, and the first difference is
found.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from instrumented_ddp.replicas.replicas import ReplicaComparison
from instrumented_ddp.watchdog.protocol import DivergenceLocation, EntriesReply, EntriesRequest, Heartbeat, LogHead
from overlapscope.diagnosis.evidence import CreatedGroup
from overlapscope.diagnosis.order_difference import (
    COMPARED_DTYPE,
    NO_POSITION,
    Compared,
    EntryDifference,
    align_entries,
    are_apart_before,
    extract_compared,
    find_first_difference,
)
from overlapscope.diagnosis.replica_drift import PassSummary
from overlapscope.trace.collective_log import (
    UNEVEN_INPUTS,
    UNKNOWN,
    CollectiveLogWriter,
    Entries,
    Signature,
    entry_digest,
)
from overlapscope.trace.json_files import from_json, to_json
from overlapscope.trace.schema import NO_BUCKET

_MASK: Final = 2**64 - 1
_CHUNK_ENTRIES: Final = 64
"""Number of entries read at a time, as the training thread may wait for the log meanwhile."""
_RECHECKED_ENTRIES: Final = 32
"""Number of agreed entries to compare again, as tensor names that were swapped may have been seen one by one."""
MAX_ENTRIES: Final = 2048
_MAX_TRANSLATIONS: Final = 64
_REQUEST_TIMEOUT_S: Final = 5.0
_MIN_DURATION_S: Final = 1.5
"""Time in seconds that replicas must differ: by then diverged collectives are found, which would be the reason."""
_MAX_DURATION_S: Final = 10.0
"""Time in seconds that replicas must differ if a neighbor has not published its fingerprints meanwhile."""


def neighbors_by_group(logs: Sequence[CollectiveLogWriter], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks before and after this one in the ring, by group.

    In a group of ranks 0, 2, 4, 6 the neighbors of rank 0 are ranks 6 and 2.
    """
    found = {}
    for log in logs:
        ranks = log.header.ranks
        if not log.header.point_to_point and rank in ranks and len(ranks) > 1:
            at = ranks.index(rank)
            found[log.header.name] = tuple({ranks[at - 1], ranks[(at + 1) % len(ranks)]})
    return found


@dataclass(kw_only=True)
class _PendingRequest:
    request: EntriesRequest
    until: LogHead
    """The neighbor's head when the request was made."""
    at_s: float


@dataclass
class NeighborComparison:
    """Comparison of this rank's logs with its neighbors'.

    Args:
        rank: rank of this process.
        signatures: signatures of this rank, indexed by number - 1.
    """

    rank: int
    signatures: list[Signature]
    _comparisons: dict[tuple[str, int], LogComparison] = field(default_factory=dict)
    _pending: dict[tuple[str, int], _PendingRequest] = field(default_factory=dict)
    """Requests that were not answered so far, by group and rank."""
    _requests_so_far: int = 0
    _answered: dict[int, int] = field(default_factory=dict)

    def look(self, logs: Sequence[CollectiveLogWriter], heartbeats: Mapping[int, Heartbeat]) -> None:
        """Compare with the latest heartbeats of the neighbors."""
        by_name = {log.header.name: log for log in logs if not log.header.point_to_point}
        for group, ranks in neighbors_by_group(logs, self.rank).items():
            for rank in ranks:
                head = heartbeats[rank].heads.get(group) if rank in heartbeats else None
                if head is not None:
                    self._compare(group, rank, by_name[group], head)

    def requests(self) -> dict[int, EntriesRequest]:
        """Return the requests for the next heartbeat, by rank."""
        now_s = time.monotonic()
        for key, asked in list(self._pending.items()):
            if now_s - asked.at_s > _REQUEST_TIMEOUT_S:  # it is busy with something else, or gone
                del self._pending[key]
        return {rank: asked.request for (_, rank), asked in self._pending.items()}

    def replies(self, logs: Sequence[CollectiveLogWriter], heartbeats: Mapping[int, Heartbeat]) -> dict[str, str]:
        """Return the replies to new requests of neighbors, by the key under which these look for them."""
        replies = {}
        for asker, request in self._unanswered(heartbeats).items():
            self._answered[asker] = request.number
            logs_of_group = (log for log in logs if log.header.name == request.group)
            log = next((log for log in logs_of_group if not log.header.point_to_point), None)
            if log is not None:
                last = min(request.last, request.first + MAX_ENTRIES)
                rows = compared_columns(log, self.signatures, request.first, last)
                replies[_key(asker, self.rank)] = to_json(
                    EntriesReply(number=request.number, rows=tuple(rows.tolist()))
                )
        return replies

    def has_unanswered_requests(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Return whether a neighbor has a request that was not answered."""
        return bool(self._unanswered(heartbeats))

    def _unanswered(self, heartbeats: Mapping[int, Heartbeat]) -> dict[int, EntriesRequest]:
        """Return new requests, by the rank that asks."""
        return {
            asker: request
            for asker, heartbeat in heartbeats.items()
            if (request := heartbeat.requests.get(self.rank)) is not None
            and self._answered.get(asker) != request.number
        }

    def reply_keys(self) -> list[str]:
        """Return the keys under which replies will be found."""
        return list(dict.fromkeys(_key(self.rank, rank) for _, rank in self._pending))

    def on_replies(self, replies: Mapping[str, bytes]) -> list[DivergenceLocation]:
        """Examine neighbors' replies, and return the divergences that are faults."""
        found = []
        for (group, rank), asked in list(self._pending.items()):
            text = replies.get(_key(self.rank, rank))
            if text is None:
                continue
            reply = from_json(EntriesReply, text)
            if reply.number != asked.request.number:
                continue
            del self._pending[group, rank]
            theirs = np.array([tuple(row) for row in reply.rows], dtype=COMPARED_DTYPE)
            difference = self._comparisons[group, rank].resolve(asked.request.first, theirs, asked.until)
            if difference is not None:
                found.append(DivergenceLocation(group=group, difference=difference))
        return found

    def stop_comparing_group(self, group: str) -> None:
        """Stop comparing a group whose ranks are known to differ."""
        for (name, _), comparison in self._comparisons.items():
            comparison.is_over |= name == group

    def _compare(self, group: str, rank: int, log: CollectiveLogWriter, theirs: LogHead) -> None:
        comparison = self._comparisons.get((group, rank))
        if comparison is None:
            comparison = self._comparisons[group, rank] = LogComparison(log, self.signatures)
        if (group, rank) in self._pending:
            return
        suspicion = comparison.look(theirs)
        if suspicion is not None:
            self._requests_so_far += 1
            request = EntriesRequest(
                number=self._requests_so_far, group=group, first=suspicion.first, last=suspicion.last
            )
            self._pending[group, rank] = _PendingRequest(request=request, until=theirs, at_s=time.monotonic())


def _key(asker: int, asked: int) -> str:
    return f"entries.{asker}.{asked}"


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A range of entry numbers within which two ranks begin to differ."""

    first: int
    last: int


def log_head(log: CollectiveLogWriter, signatures: list[Signature]) -> LogHead | None:
    """Return how far this rank is in a group's log; None before the first entry."""
    entry = _read_one(log, log.latest)
    if entry is None:
        return None
    return LogHead(
        latest=int(entry["number"]),
        hash=int(entry["hash"]),
        names_hash=int(entry["names_hash"]),
        batch=_batch_of(entry, signatures),
    )


@dataclass
class LogComparison:
    """State of the comparison with one neighbor in one group.

    Args:
        log: log of this rank.
        signatures: signatures of this rank, indexed by number - 1.
    """

    log: CollectiveLogWriter
    signatures: list[Signature]
    agreed: int = 0
    """Number of the latest entry up to which nothing differs."""
    is_over: bool = False
    """True if the ranks were found to differ: all later entries differ as well."""
    _names: tuple[int, int] = (0, 0)
    """Running hashes of tensor names at ``agreed``, ours and the neighbor's."""
    _batches: tuple[int, int] | None = None
    """Batch numbers at the latest bucket that was compared, ours and the neighbor's."""
    _bucket: int = 0
    """Entry number of the latest bucket that was compared."""
    _neighbor_name_of: dict[int, int] = field(default_factory=dict)
    """The neighbor's tensor name by ours, where a difference is legitimate: ``if rank == 0: broadcast(a) ...``."""
    _compares_names: bool = True

    def look(self, theirs: LogHead) -> Suspicion | None:
        """Compare with the neighbor's head if this rank is ahead; otherwise the neighbor does it.

        With agreement up to entry 100, and a head at 140 whose hashes differ, the suspicion covers entries 69 to 140.
        """
        if self.is_over or not self.agreed < theirs.latest <= self.log.latest:
            return None
        ours = _read_one(self.log, theirs.latest)
        if ours is None:  # the ring buffer has wrapped around: the neighbor is too far behind to be compared here
            return None
        suspicion = Suspicion(first=max(1, self.agreed + 1 - _RECHECKED_ENTRIES), last=theirs.latest)
        if int(ours["hash"]) != theirs.hash:
            return suspicion
        names = (int(ours["names_hash"]), theirs.names_hash)
        if self._compares_names and not self._names_match(names, theirs.latest):
            return suspicion
        batches = (_batch_of(ours, self.signatures), theirs.batch)
        if _may_have_skipped(self._batches, batches):
            return replace(suspicion, first=min(suspicion.first, self._bucket))
        self._agree(theirs.latest, names, batches)
        return None

    def resolve(self, first: int, theirs: Compared, until: LogHead) -> EntryDifference | None:
        """Find the reason of a suspicion.

        Args:
            first: number of the first entry of ``theirs``.
            until: the neighbor's head when the suspicion arose.

        Returns:
            None if the difference is harmless. It is then remembered, and recognized when it occurs again.
        """
        ours, theirs = align_entries(
            compared_columns(self.log, self.signatures, first, first + len(theirs) - 1), theirs
        )
        difference = find_first_difference(ours, theirs)
        if difference is not None:
            self.is_over = True
            # A rank that left out the same collectives as others launch in each step is a step ahead from there on.
            return replace(difference, predates_log=first > 1 and are_apart_before(ours, theirs, difference.number))
        self._learn_names(ours["names"], theirs["names"])
        ours_there = _read_one(self.log, until.latest)
        if ours_there is not None:
            batches = (_batch_of(ours_there, self.signatures), until.batch)
            self._agree(until.latest, (int(ours_there["names_hash"]), until.names_hash), batches)
        return None

    def _learn_names(self, ours: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]) -> None:
        differ = ours != theirs
        for mine, their in zip(ours[differ].tolist(), theirs[differ].tolist(), strict=True):
            if (
                self._neighbor_name_of.get(their) == mine
            ):  # either way round: only nearby entries show whether it is a fault
                del self._neighbor_name_of[their]
            else:
                self._neighbor_name_of[mine] = their
        # Nothing can be learned from names that change all the time.
        self._compares_names = len(self._neighbor_name_of) <= _MAX_TRANSLATIONS

    def _agree(self, number: int, names: tuple[int, int], batches: tuple[int, int]) -> None:
        self.agreed, self._names = number, names
        if NO_POSITION not in batches:
            self._batches, self._bucket = batches, number

    def _names_match(self, names: tuple[int, int], number: int) -> bool:
        """Return whether the neighbor added to its name hash what we did, apart from the names that may differ."""
        added = [(new - old) & _MASK for new, old in zip(names, self._names, strict=True)]
        if added[0] == added[1]:
            return True
        if not self._neighbor_name_of or number - self.agreed > MAX_ENTRIES:
            return False
        ours = compared_columns(self.log, self.signatures, self.agreed + 1, number)
        expected = 0
        for entry_number, mine in zip(ours["number"].tolist(), ours["names"].tolist(), strict=True):
            name = self._neighbor_name_of.get(mine, mine)
            expected += entry_digest(name, entry_number, -1) if name else 0
        return expected & _MASK == added[1]


def compared_columns(log: CollectiveLogWriter, signatures: list[Signature], first: int, last: int) -> Compared:
    """Return the compared columns of our own log's entries; empty if the first was overwritten."""
    rows = read_in_chunks(log, first, last)
    if len(rows) and int(rows["number"][0]) != first:
        rows = rows[:0]
    used = np.unique(rows["signature"]).tolist()
    return extract_compared(rows, {number: signatures[number - 1] for number in used if 0 < number <= len(signatures)})


def read_in_chunks(log: CollectiveLogWriter, first: int, last: int) -> Entries:
    """Read a range of entries in chunks, so that other threads can use the log in between."""
    parts = [
        log.read(start, min(start + _CHUNK_ENTRIES - 1, last))
        for start in range(first, min(last, log.latest) + 1, _CHUNK_ENTRIES)
    ]
    return np.concatenate(parts) if parts else log.read(1, 0)


def _read_one(log: CollectiveLogWriter, number: int) -> Any:
    entries = log.read(number, number)
    return entries[0] if len(entries) and int(entries[0]["number"]) == number else None


def _batch_of(entry: Any, signatures: list[Signature]) -> int:
    """Return the ``batch`` that ``extract_compared`` computes, of one entry: numpy would take several times as long."""
    number, batch = int(entry["signature"]), int(entry["batch"])
    is_bucket = 0 < number <= len(signatures) and signatures[number - 1].bucket != NO_BUCKET
    return batch if is_bucket and batch != UNKNOWN and not int(entry["flags"]) & UNEVEN_INPUTS else NO_POSITION


def _may_have_skipped(before: tuple[int, int] | None, now: tuple[int, int]) -> bool:
    """Return whether one rank has advanced further in its data than the other since the last compared bucket.

    From batches (10, 10) to (14, 15) one rank has skipped a batch. A rank whose count drops has begun anew, as in each
    epoch, and may be anywhere.
    """
    if before is None or NO_POSITION in now or now[0] < before[0] or now[1] < before[1]:
        return False
    return now[0] - before[0] != now[1] - before[1]


def list_digest(ranks: Sequence[int]) -> int:
    """Return a number that tells lists of ranks apart."""
    return crc32(repr(tuple(ranks)).encode())


@dataclass
class CreatedGroupCheck:
    """Comparison of the lists of ranks with which this rank and its neighbors make process groups."""

    _judged: set[str] = field(default_factory=set)
    """Names of groups for which an alarm was raised."""

    def found(self, own: Iterable[CreatedGroup], heartbeats: Iterable[Heartbeat]) -> bool:
        """Return whether a neighbor has made a group with another list than this rank, for the first time."""
        digests = {one.name: list_digest(one.ranks) for one in own if one.name not in self._judged}
        differing = {
            name
            for heartbeat in heartbeats
            for name in digests.keys() & heartbeat.created_groups.keys()
            if heartbeat.created_groups[name] != digests[name]
        }
        self._judged |= differing
        return bool(differing)


class ReplicaCheck:
    """Comparison of one rank's model replicas with the neighbors', each until it was investigated.

    The fingerprints are taken at the same time on all ranks.

    Args:
        replicas: replicas of this process.
    """

    def __init__(self, replicas: ReplicaComparison) -> None:
        self._replicas = replicas
        self._differ_since: dict[tuple[int, str], tuple[float, int]] = {}
        """Time and number of reductions since which replicas differ, by rank and key."""
        self._judged: set[str] = set()
        """Keys of models that were found to differ."""

    def found(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Return whether a neighbor has had other parameters for a while, according to its heartbeats."""
        by_key: dict[str, dict[int, PassSummary]] = {}
        for rank, heartbeat in heartbeats.items():
            for key, theirs in heartbeat.replicas.items():
                by_key.setdefault(key, {})[rank] = theirs
        return any(
            self._has_differed_for_long(key, rank, summaries)
            for key, summaries in by_key.items()
            if key not in self._judged
            for rank in summaries
        )

    def _has_differed_for_long(self, key: str, rank: int, summaries: Mapping[int, PassSummary]) -> bool:
        """Return whether a neighbor's replica has differed, and all have taken their fingerprints since then.

        A neighbor that is late is waited for: without it, two of three ranks can only disagree. Example: different
        since reduction 40, and the longest period is 16, so the latest passes of all must begin at 56 or later.
        """
        theirs = summaries[rank]
        agrees = self._replicas.agrees(key, rank, theirs) if rank in self._replicas.ranks_of(key) else None
        if agrees:
            self._differ_since.pop((rank, key), None)
        if agrees is not False:
            return False
        now_s = time.monotonic()
        since_s, since = self._differ_since.setdefault((rank, key), (now_s, theirs.first))
        waits = now_s - since_s < _MAX_DURATION_S
        latest = min(one.first for one in summaries.values()) if waits else theirs.first
        longest = max(one.period for one in summaries.values())
        return now_s - since_s >= _MIN_DURATION_S and latest >= since + longest

    def on_investigation(self) -> None:
        """Keep the fingerprints for the investigation, and stop comparing the models that differ now."""
        self._judged.update(key for _, key in self._differ_since)
        self._differ_since.clear()
        self._replicas.pin()
