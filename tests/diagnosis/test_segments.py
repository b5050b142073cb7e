"""Who waits for whom within sums of sends and receives, in all places in which a rank can stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.strategies import all_reduces, parameter_server
from overlapscope.diagnosis.evidence import Entry, Evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.collective_log import FAILED, Signature
from tests.diagnosis.jobs import CLOSED, group, idle, job, rank

NAME = "some strategy"
STEP = 7


@dataclass(frozen=True, kw_only=True)
class Round:
    """Of one rank."""

    phase: str
    number: int
    rounds: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]

    def messages(self, tag: int) -> list[Signature]:
        what = {"dtype": "float32", "role": "segment", "bucket": 0, "strategy": NAME, "tag": tag}
        what |= {"phase": self.phase, "round": self.number, "rounds": self.rounds}
        sides = (("recv", self.receives), ("send", self.sends))
        return [Signature(op=op, peer=peer, **what) for op, peers in sides for peer in peers]  # type: ignore[arg-type]


@dataclass
class Paper:
    """A wire on which nothing is sent: what would be is written down, by lane."""

    rank: int
    size: int
    ranks: Sequence[int]
    lane: int = 0
    bucket: int = 0
    lanes: dict[int, list[Round]] = field(default_factory=dict)
    _phase: tuple[str, int, int] = ("", 0, 0)

    def exchange(self, *, sends: Sequence[Any] = (), receives: Sequence[Any] = ()) -> None:
        phase, rounds, number = self._phase
        self._phase = phase, rounds, number + 1
        to, by = (tuple(self.ranks[peer] for tensor, peer in side if tensor.numel()) for side in (sends, receives))
        if to or by:
            what = Round(phase=phase, number=number + 1, rounds=rounds, sends=to, receives=by)
            self.lanes.setdefault(self.lane, []).append(what)

    @contextmanager
    def phase(self, name: str, rounds: int = 0) -> Iterator[None]:
        before, self._phase = self._phase, (name, rounds, 0)
        yield
        self._phase = before

    def among(self, ranks: Sequence[int], where: str = "") -> Paper:
        of_job = [self.ranks[rank] for rank in ranks]
        return Paper(of_job.index(self.ranks[self.rank]), len(of_job), of_job, self.lane, 0, self.lanes)

    def together(self, *parts: Callable[[Paper], None]) -> None:
        for lane, part in enumerate(parts):
            part(Paper(self.rank, self.size, self.ranks, lane, 0, self.lanes))


def two_a_host(buffer: torch.Tensor, wire: Any) -> None:
    strategy = all_reduces.Hierarchical()
    strategy._by_host = [[rank, rank + 1] for rank in range(0, wire.size - 1, 2)] + [[wire.size - 1]] * (wire.size % 2)
    strategy(buffer, wire)


def without_phases(buffer: torch.Tensor, wire: Any) -> None:
    """As users write them: to rank 0 and back, twice."""
    for _ in range(2):
        wire.exchange(receives=[(buffer, rank) for rank in range(1, wire.size) if wire.rank == 0])
        if wire.rank > 0:
            wire.exchange(sends=[(buffer, 0)])
            wire.exchange(receives=[(buffer, 0)])
        wire.exchange(sends=[(buffer, rank) for rank in range(1, wire.size) if wire.rank == 0])


ALGORITHMS: dict[str, Callable[[torch.Tensor, Any], None]] = {
    "ring": all_reduces.ring_all_reduce,
    "tree": all_reduces.tree_all_reduce,
    "double_tree": all_reduces.double_tree_all_reduce,
    "direct": all_reduces.one_shot,
    "direct_two_shot": all_reduces.two_shot,
    "parameter_server": parameter_server.ParameterServers(),
    "two servers": parameter_server.ParameterServers(2),
    "hierarchical": two_a_host,
    "one of the user's": without_phases,
}


def rounds_of(name: str, size: int) -> list[dict[int, list[Round]]]:
    """By rank and lane."""
    found = []
    for number in range(size):
        paper = Paper(number, size, range(size))
        ALGORITHMS[name](torch.zeros(101), paper)
        found.append(paper.lanes)
    return found


Link = tuple[int, int, int, int]
"""From a rank to another, in a lane: the message of this number, from 1."""


@dataclass
class Jam:
    """How far each rank has come in each of its lanes, when nothing moves any more.

    A round is over when all of its messages have both sides: the first with the first between two ranks, and so on.
    """

    lanes: list[dict[int, list[Round]]]
    victim: int | None = None
    stops_at: int = 0
    """So many rounds of each lane the victim has posted, and no more."""
    lost: Link | None = None
    """It never arrives."""

    def __post_init__(self) -> None:
        self.posted = {(one, lane): 0 for one, of_rank in enumerate(self.lanes) for lane in of_rank}
        while any(self._moves(*key) for key in self.posted):
            pass

    def _moves(self, one: int, lane: int) -> bool:
        number, rounds = self.posted[one, lane], self.lanes[one][lane]
        can = number < (min(self.stops_at, len(rounds)) if one == self.victim else len(rounds))
        can = can and (number == 0 or self.over(one, lane) == len(rounds[number - 1].messages(lane)))
        self.posted[one, lane] += can
        return can

    def over(self, one: int, lane: int) -> int:
        """How many messages of the newest round are over: they are waited for in turn, receives first."""
        number = self.posted[one, lane]
        messages = self.lanes[one][lane][number - 1].messages(lane)
        are_over = [self._is_over(one, lane, message) for message in messages]
        return len(messages) if all(are_over) else are_over.index(False)

    def _is_over(self, one: int, lane: int, message: Signature) -> bool:
        peer = message.peer
        assert peer is not None
        ours, theirs = ("receives", "sends") if message.op == "recv" else ("sends", "receives")
        turn = self._count(one, lane, ours, peer)
        way = (peer, one) if message.op == "recv" else (one, peer)
        return self._count(peer, lane, theirs, one) >= turn and self.lost != (*way, lane, turn)

    def _count(self, one: int, lane: int, side: str, peer: int) -> int:
        posted = self.lanes[one].get(lane, [])[: self.posted.get((one, lane), 0)]
        return sum(getattr(each, side).count(peer) for each in posted)

    def has_come_through(self, one: int) -> bool:
        return one != self.victim and all(
            self.posted[one, lane] == len(rounds) and self.over(one, lane) == len(rounds[-1].messages(lane))
            for lane, rounds in self.lanes[one].items()
        )


def evidence_of(jam: Jam, *, has_failed: bool = False) -> Evidence:
    victim, size = jam.victim, len(jam.lanes)
    the_sum = Signature(op="all_reduce", dtype="float32", elements=101, role="bucket", bucket=0, strategy=NAME)
    sums, messages, ranks = {}, {}, []
    for number, lanes in enumerate(jam.lanes):
        entries: list[Entry] = []
        for lane, rounds in lanes.items():
            posted = jam.posted[number, lane]
            for place, one in enumerate(rounds[:posted], start=1):
                what = one.messages(lane)
                over = len(what) if place < posted else jam.over(number, lane)
                first = len(entries) + 1
                entries += [entry_of(first + turn, each, turn < over) for turn, each in enumerate(what)]
        fails = has_failed and number != victim and not jam.has_come_through(number)
        sums[number] = (entry_of(1, the_sum, jam.has_come_through(number) or fails, has_failed=fails),)
        if entries:
            messages[number] = tuple(entries)
        if fails:
            ranks.append(rank(number, "failed", step=STEP, failure=CLOSED))
        else:
            found = rank(number, ("gone" if has_failed else "stopped") if number == victim else "sleeping", step=STEP)
            ranks.append(found if has_failed else idle(found, 9))
    point_to_point_orders = (group(messages, ranks=range(size)),) if messages else ()
    return job(*ranks, groups=[group(sums)], point_to_point_orders=point_to_point_orders, is_live=not has_failed)


def entry_of(number: int, signature: Signature, is_over: bool, *, has_failed: bool = False) -> Entry:
    return Entry(
        number=number,
        signature=signature,
        step=STEP,
        phase="finalize",
        announced_ns=number,
        launched_ns=number,
        completed_ns=number + 1 if is_over else None,
        flags=FAILED if has_failed else 0,
    )


@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(2, 7), st.data())
def test_all_wait_for_the_one_that_has_stopped_whatever_the_round(name: str, size: int, data: st.DataObject) -> None:
    victim = data.draw(st.integers(0, size - 1))
    longest = max(map(len, rounds_of(name, size)[victim].values()), default=0)
    stops_at = data.draw(st.integers(0, max(0, longest - 1)))
    evidence = evidence_of(Jam(rounds_of(name, size), victim, stops_at))
    facts = Facts(evidence)
    assert facts.awaited in ((victim,), ())
    assert victim not in facts.waiting
    unfinished = {number for number in range(size) if evidence.groups[0].windows[number][0].state != "completed"}
    assert set(facts.waiting) == unfinished - {victim}
    verdict = judge(evidence)
    assert (verdict.kind, verdict.blamed) == ("stopped", (victim,))


@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(3, 6), st.data())
def test_who_is_killed_is_accused_and_never_who_fails_for_it(name: str, size: int, data: st.DataObject) -> None:
    victim = data.draw(st.integers(0, size - 1))
    longest = max(map(len, rounds_of(name, size)[victim].values()), default=0)
    stops_at = data.draw(st.integers(0, max(0, longest - 1)))
    verdict = judge(evidence_of(Jam(rounds_of(name, size), victim, stops_at), has_failed=True))
    assert (verdict.kind, verdict.blamed) == ("killed", (victim,))


@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(2, 6), st.data())
def test_of_a_message_that_is_lost_nobody_is_accused(name: str, size: int, data: st.DataObject) -> None:
    lanes = rounds_of(name, size)
    links = sorted(
        {
            (one, peer, lane, number)
            for one, of_rank in enumerate(lanes)
            for lane, rounds in of_rank.items()
            for peer in range(size)
            for number in range(1, sum(each.sends.count(peer) for each in rounds) + 1)
        }
    )
    jam = Jam(lanes, lost=data.draw(st.sampled_from(links)))
    evidence = evidence_of(jam)
    assert Facts(evidence).awaited == ()
    assert judge(evidence).named == ()
