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

from instrumented_ddp.watchdog.comparison import MOST_ENTRIES, Comparison, compared_of
from instrumented_ddp.watchdog.messages import Answer, Beat, Head, Pointer, Question
from overlapscope.diagnosis.difference import COMPARED_DTYPE
from overlapscope.diagnosis.plain import from_json, to_json
from overlapscope.trace.group_log import GroupLog
from overlapscope.trace.signature import Signature

_ASK_AGAIN_AFTER_S: Final = 5.0


def neighbours_of(logs: Sequence[GroupLog], rank: int) -> dict[str, tuple[int, ...]]:
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
class _Asked:
    question: Question
    until: Head
    """The neighbor's head when the request was made."""
    at_s: float


@dataclass
class Neighbours:
    """Comparison of this rank's logs with its neighbors'.

    Args:
        rank: rank of this process.
        signatures: signatures of this rank, indexed by number - 1.
    """

    rank: int
    signatures: list[Signature]
    _comparisons: dict[tuple[str, int], Comparison] = field(default_factory=dict)
    _asked: dict[tuple[str, int], _Asked] = field(default_factory=dict)
    """Requests that were not answered so far, by group and rank."""
    _questions_so_far: int = 0
    _answered: dict[int, int] = field(default_factory=dict)

    def look(self, logs: Sequence[GroupLog], beats: Mapping[int, Beat]) -> None:
        """Compare with the latest heartbeats of the neighbors."""
        by_name = {log.header.name: log for log in logs if not log.header.point_to_point}
        for group, ranks in neighbours_of(logs, self.rank).items():
            for rank in ranks:
                head = beats[rank].heads.get(group) if rank in beats else None
                if head is not None:
                    self._compare(group, rank, by_name[group], head)

    def questions(self) -> dict[int, Question]:
        """Return the requests for the next heartbeat, by rank."""
        now_s = time.monotonic()
        for key, asked in list(self._asked.items()):
            if now_s - asked.at_s > _ASK_AGAIN_AFTER_S:  # it is busy with something else, or gone
                del self._asked[key]
        return {rank: asked.question for (_, rank), asked in self._asked.items()}

    def answers(self, logs: Sequence[GroupLog], beats: Mapping[int, Beat]) -> dict[str, str]:
        """Return the replies to new requests of neighbors, by the key under which these look for them."""
        answers = {}
        for asker, question in self._unanswered(beats).items():
            self._answered[asker] = question.number
            logs_of_group = (log for log in logs if log.header.name == question.group)
            log = next((log for log in logs_of_group if not log.header.point_to_point), None)
            if log is not None:
                last = min(question.last, question.first + MOST_ENTRIES)
                rows = compared_of(log, self.signatures, question.first, last)
                answers[_key(asker, self.rank)] = to_json(Answer(number=question.number, rows=tuple(rows.tolist())))
        return answers

    def is_asked(self, beats: Mapping[int, Beat]) -> bool:
        """Return whether a neighbor has a request that was not answered."""
        return bool(self._unanswered(beats))

    def _unanswered(self, beats: Mapping[int, Beat]) -> dict[int, Question]:
        """Return new requests, by the rank that asks."""
        return {
            asker: question
            for asker, beat in beats.items()
            if (question := beat.questions.get(self.rank)) is not None and self._answered.get(asker) != question.number
        }

    def awaited(self) -> list[str]:
        """Return the keys under which replies will be found."""
        return list(dict.fromkeys(_key(self.rank, rank) for _, rank in self._asked))

    def hear(self, answers: Mapping[str, bytes]) -> list[Pointer]:
        """Examine neighbors' replies, and return the divergences that are faults."""
        found = []
        for (group, rank), asked in list(self._asked.items()):
            text = answers.get(_key(self.rank, rank))
            if text is None:
                continue
            answer = from_json(Answer, text)
            if answer.number != asked.question.number:
                continue
            del self._asked[group, rank]
            theirs = np.array([tuple(row) for row in answer.rows], dtype=COMPARED_DTYPE)
            difference = self._comparisons[group, rank].resolve(asked.question.first, theirs, asked.until)
            if difference is not None:
                found.append(Pointer(group=group, difference=difference))
        return found

    def stop_comparing(self, group: str) -> None:
        """Stop comparing a group whose ranks are known to differ."""
        for (name, _), comparison in self._comparisons.items():
            comparison.is_over |= name == group

    def _compare(self, group: str, rank: int, log: GroupLog, theirs: Head) -> None:
        comparison = self._comparisons.get((group, rank))
        if comparison is None:
            comparison = self._comparisons[group, rank] = Comparison(log, self.signatures)
        if (group, rank) in self._asked:
            return
        suspicion = comparison.look(theirs)
        if suspicion is not None:
            self._questions_so_far += 1
            question = Question(number=self._questions_so_far, group=group, first=suspicion.first, last=suspicion.last)
            self._asked[group, rank] = _Asked(question=question, until=theirs, at_s=time.monotonic())


def _key(asker: int, asked: int) -> str:
    return f"answer.{asker}.{asked}"
