"""Evidence written by hand: what a few ranks are known to have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlapscope.diagnosis.evidence import (
    CallSite,
    Entry,
    Evidence,
    Failure,
    GroupOrder,
    Liveness,
    RankEvidence,
    RankPosition,
)
from overlapscope.trace.collective_log import FAILED
from overlapscope.trace.schema import Signature
from tests.ordered import bucket

CLOSED = Failure(
    type="RuntimeError", message="[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
)
TIMED_OUT = Failure(
    type="RuntimeError", message="[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"
)


def site(line: int) -> CallSite:
    return CallSite(file="train.py", line=line, function="main")


def entry(number: int, signature: Signature, *, step: int = 0, is_done: bool = True, line: int = 42) -> Entry:
    """Announced 100 us after the one before it."""
    announced_ns = number * 100_000
    return Entry(
        number=number,
        signature=signature,
        step=step,
        batch=step,
        call_site=site(line),
        announced_ns=announced_ns,
        launched_ns=announced_ns + 1_000,
        completed_ns=announced_ns + 50_000 if is_done else None,
    )


def trained(collectives: int, *, buckets: int = 3, is_waiting: bool = False) -> tuple[Entry, ...]:
    """So many all-reduces of buckets; the newest has not completed if the rank waits in it."""
    return tuple(
        entry(
            number,
            bucket((number - 1) % buckets),
            step=(number - 1) // buckets,
            is_done=number < collectives or not is_waiting,
        )
        for number in range(1, collectives + 1)
    )


def group(
    windows: Mapping[int, Sequence[Entry]], *, name: str = "default", ranks: Sequence[int] | None = None, **more: Any
) -> GroupOrder:
    """What its ranks did in a group."""
    return GroupOrder(
        name=name,
        ranks=tuple(ranks if ranks is not None else sorted(windows)),
        latest={rank: window[-1].number for rank, window in windows.items()},
        windows={rank: tuple(window) for rank, window in windows.items()},
        oldest_incomplete={
            rank: next(entry for entry in window if entry.state != "completed")
            for rank, window in windows.items()
            if window[-1].state != "completed"
        },
        **more,
    )


def rank(
    number: int,
    liveness: Liveness = "sleeping",
    *,
    phase: str | None = "finalize",
    step: int = 0,
    since_ns: int = 0,
    **more: Any,
) -> RankEvidence:
    """A rank in some phase; since before its first collective, unless said otherwise."""
    is_after_update = phase in ("loop", "evaluation")
    position = RankPosition(step=step, phase=phase, since_ns=since_ns, is_after_update=is_after_update)
    return RankEvidence(rank=number, liveness=liveness, position=position, **more)


def job(*ranks: RankEvidence, groups: Sequence[GroupOrder] = (), world: int | None = None, **more: Any) -> Evidence:
    """All that is known of a job; of ``world`` ranks, by default those that are known."""
    size = len(ranks) if world is None else world
    return Evidence(
        expected_ranks=tuple(range(size)), ranks={one.rank: one for one in ranks}, groups=tuple(groups), **more
    )


def idle(one: RankEvidence, seconds: float, step_s: float = 0.1) -> RankEvidence:
    """It has done nothing for so long."""
    return replace(one, idle_ns=round(seconds * 1e9), step_time_ns=round(step_s * 1e9))


IN_LOADER = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/home/me/train.py", line 7 in __getitem__\n'
    '  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 50 in fetch\n'
    '  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 700 in __next__\n'
    '  File "/home/me/train.py", line 12 in main\n'
)
"""Stacks of a rank whose data loader reads an example."""

WAITING = trained(9, is_waiting=True)
LATE = trained(6)
HELD_UP = group({0: WAITING, 1: LATE, 2: WAITING})
"""Rank 1 has not begun its third step, the others wait for its buckets."""


def held_up(one: RankEvidence, **more: object) -> Evidence:
    """The others wait for rank 1, of which this is known."""
    return job(rank(0, step=2), one, rank(2, step=2), groups=[HELD_UP], **more)  # type: ignore[arg-type]


def failing(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The last one ended with an error of the backend."""
    return (*entries[:-1], replace(entries[-1], flags=FAILED, completed_ns=entries[-1].announced_ns + 1))
