"""The ranks that this one is compared with: its two neighbours in the ring of each group.

Each rank compares with its neighbours alone, whatever the size of the job; as equality is transitive, all ranks of a
group are compared. A rank that finds a difference asks the other for its entries in its next beat.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from instrumented_ddp.watchdog.comparison import MOST_ENTRIES, Comparison, Head, Item, Suspicion, items_of
from instrumented_ddp.watchdog.live_evidence import Pointer
from overlapscope.trace.group_log import GroupLog
from overlapscope.trace.signature import Signature

_ASK_AGAIN_AFTER_S: Final = 5.0


def neighbours_of(logs: Sequence[GroupLog], rank: int) -> dict[str, tuple[int, ...]]:
    """By group: the ranks before and after this one."""
    found = {}
    for log in logs:
        ranks = log.header.ranks
        if not log.header.point_to_point and rank in ranks and len(ranks) > 1:
            at = ranks.index(rank)
            found[log.header.name] = tuple({ranks[at - 1], ranks[(at + 1) % len(ranks)]})
    return found


@dataclass(kw_only=True)
class _Question:
    number: int
    suspicion: Suspicion
    until: Head
    asked_s: float


@dataclass
class Neighbours:
    """Compares this rank's logs with its neighbours'.

    Args:
        rank: this one.
        signatures: of this rank, by number - 1.
    """

    rank: int
    signatures: list[Signature]
    _comparisons: dict[tuple[str, int], Comparison] = field(default_factory=dict)
    _questions: dict[tuple[str, int], _Question] = field(default_factory=dict)
    _asked: int = 0
    _answered: dict[int, int] = field(default_factory=dict)

    def look(self, logs: Sequence[GroupLog], beats: Mapping[int, Mapping[str, Any]]) -> None:
        """Compare with what neighbours have said."""
        by_name = {log.header.name: log for log in logs if not log.header.point_to_point}
        for group, ranks in neighbours_of(logs, self.rank).items():
            for rank in ranks:
                head = beats.get(rank, {}).get("heads", {}).get(group)
                if head is not None:
                    self._compare(group, rank, by_name[group], Head.from_plain(head))

    def questions(self) -> dict[str, list[Any]]:
        """What to ask in the next beat: by rank, the number of the question, the group and the entries."""
        now_s = time.monotonic()
        for key, question in list(self._questions.items()):
            if now_s - question.asked_s > _ASK_AGAIN_AFTER_S:  # it is busy with something else, or gone
                del self._questions[key]
        return {
            str(rank): [one.number, group, one.suspicion.first, one.suspicion.last]
            for (group, rank), one in self._questions.items()
        }

    def answers(self, logs: Sequence[GroupLog], beats: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
        """What neighbours have asked and not been told, by the key under which they look for it."""
        answers = {}
        for asker, beat in beats.items():
            question = beat.get("asks", {}).get(str(self.rank))
            if question is None or self._answered.get(asker) == question[0]:
                continue
            number, group, first, last = question
            self._answered[asker] = number
            log = next((log for log in logs if log.header.name == group and not log.header.point_to_point), None)
            if log is not None:
                items = items_of(log, self.signatures, first, min(last, first + MOST_ENTRIES))
                answers[_key(asker, self.rank)] = json.dumps([number, [list(asdict(item).values()) for item in items]])
        return answers

    def is_asked(self, beats: Mapping[int, Mapping[str, Any]]) -> bool:
        """A neighbour has a question that was not answered."""
        return any(
            (question := beat.get("asks", {}).get(str(self.rank))) is not None
            and self._answered.get(asker) != question[0]
            for asker, beat in beats.items()
        )

    def awaited(self) -> list[str]:
        """The keys under which answers will be found."""
        return list(dict.fromkeys(_key(self.rank, rank) for _, rank in self._questions))

    def hear(self, answers: Mapping[str, bytes]) -> list[Pointer]:
        """Look into what neighbours have answered: the differences that are faults."""
        found = []
        for (group, rank), question in list(self._questions.items()):
            answer = answers.get(_key(self.rank, rank))
            if answer is None:
                continue
            number, raw = json.loads(answer)
            if number != question.number:
                continue
            del self._questions[group, rank]
            theirs = [Item(hash=item[0], names=item[1], step=item[2], batch=item[3]) for item in raw]
            difference = self._comparisons[group, rank].resolve(question.suspicion.first, theirs, question.until)
            if difference is not None:
                found.append(Pointer(group=group, number=difference.number, divergence=difference.divergence))
        return found

    def stop_comparing(self, group: str) -> None:
        """Its ranks are known to differ."""
        for (name, _), comparison in self._comparisons.items():
            comparison.is_over |= name == group

    def _compare(self, group: str, rank: int, log: GroupLog, theirs: Head) -> None:
        comparison = self._comparisons.get((group, rank))
        if comparison is None:
            comparison = self._comparisons[group, rank] = Comparison(log, self.signatures)
        if (group, rank) in self._questions:
            return
        suspicion = comparison.look(theirs)
        if suspicion is not None:
            self._asked += 1
            self._questions[group, rank] = _Question(
                number=self._asked, suspicion=suspicion, until=theirs, asked_s=time.monotonic()
            )


def _key(asker: int, asked: int) -> str:
    return f"answer.{asker}.{asked}"
