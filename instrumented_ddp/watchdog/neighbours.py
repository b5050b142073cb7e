"""Comparison of this rank's collectives with those of its two neighbors in the ring of each group.

Each rank compares with its neighbors only, whatever the size of the job; as equality is transitive, all ranks of a
group are compared. A rank that finds a difference requests the other's entries in its next heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from instrumented_ddp.watchdog.comparison import MAX_ENTRIES, Comparison, compared_columns
from instrumented_ddp.watchdog.messages import DivergenceLocation, EntriesReply, EntriesRequest, Heartbeat, LogHead
from overlapscope.diagnosis.difference import COMPARED_DTYPE
from overlapscope.diagnosis.plain import from_json, to_json
from overlapscope.trace.group_log import CollectiveLogWriter
from overlapscope.trace.signature import Signature

_REQUEST_TIMEOUT_S: Final = 5.0


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
    question: EntriesRequest
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
    _comparisons: dict[tuple[str, int], Comparison] = field(default_factory=dict)
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
        return {rank: asked.question for (_, rank), asked in self._pending.items()}

    def replies(self, logs: Sequence[CollectiveLogWriter], heartbeats: Mapping[int, Heartbeat]) -> dict[str, str]:
        """Return the replies to new requests of neighbors, by the key under which these look for them."""
        replies = {}
        for asker, question in self._unanswered(heartbeats).items():
            self._answered[asker] = question.number
            logs_of_group = (log for log in logs if log.header.name == question.group)
            log = next((log for log in logs_of_group if not log.header.point_to_point), None)
            if log is not None:
                last = min(question.last, question.first + MAX_ENTRIES)
                rows = compared_columns(log, self.signatures, question.first, last)
                replies[_key(asker, self.rank)] = to_json(
                    EntriesReply(number=question.number, rows=tuple(rows.tolist()))
                )
        return replies

    def has_unanswered_requests(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Return whether a neighbor has a request that was not answered."""
        return bool(self._unanswered(heartbeats))

    def _unanswered(self, heartbeats: Mapping[int, Heartbeat]) -> dict[int, EntriesRequest]:
        """Return new requests, by the rank that asks."""
        return {
            asker: question
            for asker, heartbeat in heartbeats.items()
            if (question := heartbeat.requests.get(self.rank)) is not None
            and self._answered.get(asker) != question.number
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
            answer = from_json(EntriesReply, text)
            if answer.number != asked.question.number:
                continue
            del self._pending[group, rank]
            theirs = np.array([tuple(row) for row in answer.rows], dtype=COMPARED_DTYPE)
            difference = self._comparisons[group, rank].resolve(asked.question.first, theirs, asked.until)
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
            comparison = self._comparisons[group, rank] = Comparison(log, self.signatures)
        if (group, rank) in self._pending:
            return
        suspicion = comparison.look(theirs)
        if suspicion is not None:
            self._requests_so_far += 1
            question = EntriesRequest(
                number=self._requests_so_far, group=group, first=suspicion.first, last=suspicion.last
            )
            self._pending[group, rank] = _PendingRequest(question=question, until=theirs, at_s=time.monotonic())


def _key(asker: int, asked: int) -> str:
    return f"answer.{asker}.{asked}"
