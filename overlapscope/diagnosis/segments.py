"""Bucket sums that strategies build from sends and receives: the round in which a rank waits, and for whom.

Each rank numbers its own messages, so the two sides of one are matched by its purpose: the sum, which has the same
number on all ranks, the phase and the round. A message is posted on both sides before any of it is transferred. So a
rank that has posted its side waits for one that has not, and never for one that has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overlapscope.diagnosis.evidence import Entry, GroupOrder
from overlapscope.trace.signature import POINT_TO_POINT


@dataclass(frozen=True, kw_only=True)
class SegmentMessage:
    """One side of a message, in the latest round of a rank, that is not known to be complete."""

    entry: Entry
    peer: int
    is_answered: bool | None
    """True if the other side has posted its part; None if unknown."""


def is_segment(entry: Entry) -> bool:
    """Return True for a message of a bucket's sum."""
    return entry.signature.role == "segment" and entry.signature.op in POINT_TO_POINT


def is_bucket_sum(entry: Entry) -> bool:
    """Return True for the sum of a bucket that is built from messages."""
    return entry.signature.role == "bucket" and bool(entry.signature.strategy)


def find_open_messages(
    group: GroupOrder, point_to_point_orders: Iterable[GroupOrder], rank: int, number: int
) -> tuple[SegmentMessage, ...]:
    """Return the messages that a rank may be waiting in, sends and receives.

    Args:
        group: group of the sum.
        conversations: messages of several groups, including this one.
        number: number of the sum in the group. If it has failed, so have some of its last messages, but it is unknown
            which: then all of these count.
    """
    conversation = next(
        (one for one in point_to_point_orders if (one.name, one.ranks) == (group.name, group.ranks)), None
    )
    own = None if conversation is None else _messages_of(group, conversation, rank, number)
    if conversation is None or not own:
        return ()
    has_failed = any(entry.number == number and entry.state == "failed" for entry in group.windows[rank])
    latest = {entry.signature.tag: _round_of(entry) for entry in own}  # one per sum that runs concurrently
    return tuple(
        SegmentMessage(
            entry=entry,
            peer=peer,
            is_answered=_is_answered(entry, rank, own, _messages_of(group, conversation, peer, number)),
        )
        for entry in own
        if _round_of(entry) in latest.values()
        and (has_failed or entry.state != "completed")
        and (peer := entry.signature.peer) is not None
    )


def is_in_transit(messages: Iterable[SegmentMessage]) -> bool:
    """Return True if a rank waits for data of a message that both sides have posted, rather than for the other rank.

    Args:
        messages: messages of the rank, from ``find_open_messages``. They are waited for in order, so the state of the later
            ones is unknown.
    """
    first: dict[int, SegmentMessage] = {}
    for message in messages:
        first.setdefault(message.entry.signature.tag, message)
    return any(message.is_answered for message in first.values())


def _messages_of(group: GroupOrder, conversation: GroupOrder, rank: int, number: int) -> list[Entry] | None:
    """Return the messages of a sum, in order; None if unknown."""
    sums = {entry.number: entry for entry in group.windows.get(rank, ())}
    if number not in sums:
        return [] if rank in group.latest and group.latest[rank] < number else None
    of = sums[number]
    what = of.signature.model, of.signature.bucket
    later = [
        one for one in sums.values() if one.number > number and (one.signature.model, one.signature.bucket) == what
    ]
    until_ns = min((one.announced_ns for one in later), default=None)
    return [
        entry
        for entry in conversation.windows.get(rank, ())
        if is_segment(entry)
        and (entry.signature.model, entry.signature.bucket) == what
        and entry.announced_ns >= of.announced_ns
        and (until_ns is None or entry.announced_ns < until_ns)
    ]


def _phase_of(entry: Entry) -> tuple[int, str]:
    return entry.signature.tag, entry.signature.phase


def _round_of(entry: Entry) -> tuple[int, str, int]:
    return *_phase_of(entry), entry.signature.round


def _is_answered(entry: Entry, rank: int, own: list[Entry], of_peer: list[Entry] | None) -> bool | None:
    if of_peer is None:
        return None
    (opposite,) = set(POINT_TO_POINT) - {entry.signature.op}
    get_key = _round_of if entry.signature.rounds else _phase_of
    side, other_side = (entry.signature.op, entry.signature.peer), (opposite, rank)
    # Where rounds are not numbered alike, messages between two ranks are matched by their order in the phase.
    occurrence = sum(
        _side(one) == side and get_key(one) == get_key(entry) and one.number <= entry.number for one in own
    )
    return sum(_side(one) == other_side and get_key(one) == get_key(entry) for one in of_peer) >= occurrence


def _side(entry: Entry) -> tuple[str, int | None]:
    return entry.signature.op, entry.signature.peer
