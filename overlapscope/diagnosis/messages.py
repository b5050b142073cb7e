"""Sends and receives of user code: which message of one rank meets which of another.

The n-th send of rank a to rank b with a tag is received by the n-th recv of b from a with that tag. Both ranks number
their messages separately, and only the latest are known, so counting decides only where both logs are known from the
first message on. Otherwise only a message that is still open can be the other side.
"""

from __future__ import annotations

from dataclasses import replace

from overlapscope.diagnosis.evidence import Entry, GroupOrder, RankEvidence
from overlapscope.diagnosis.failures import is_consequence
from overlapscope.trace.collective_log import FAILED, POINT_TO_POINT


def find_messages_in_flight(group: GroupOrder, one: RankEvidence, latest: Entry) -> list[Entry]:
    """Return the messages that a rank may be waiting in, in order: the incomplete ones since its latest complete one.

    Example: of send 1, irecv 2 (complete), isend 3 and irecv 4, these are 3 and 4.
    """
    found = [latest]
    for entry in reversed(group.windows.get(one.rank, ())):
        if entry.number >= latest.number or entry.signature.role == "segment":
            continue
        message = mark_failed(entry, one)
        if message.state == "completed":
            break
        found.append(message)
    return found[::-1]


def mark_failed(entry: Entry, one: RankEvidence) -> Entry:
    """Return an entry of a rank, marked as failed if it is a message in which an exception ended the rank.

    A send or a recv of gloo whose wait was given up counts as completed afterwards.
    """
    failure = one.failure or (one.exit_call.caught if one.exit_call is not None else None)
    has_failed = (
        entry.signature.op in POINT_TO_POINT
        and is_consequence(failure)
        and failure is not None
        and entry.completed_ns is not None
        and entry.completed_ns >= failure.time_ns > 0
    )
    return replace(entry, flags=entry.flags | FAILED) if has_failed else entry


def is_answered(group: GroupOrder, rank: int, entry: Entry) -> bool | None:
    """Return True if the peer of a message has launched its side; None if that is unknown.

    The other side of a message that has failed may have been launched too late, so only its absence is known.
    """
    peer = entry.signature.peer
    if peer is None or peer not in group.ranks or (not group.windows.get(peer) and group.latest.get(peer)):
        return None
    sides = _other_sides(group, rank, entry, peer)
    if not _can_be_counted(group, rank, peer):
        return None if any(one.state != "completed" for one in sides) else False
    if any(one.signature.peer is None for one in sides):  # it may have received what another rank sent
        return None
    is_there = len(sides) >= _ordinal(group, rank, entry)
    return None if is_there and entry.state == "failed" else is_there


def find_answer(group: GroupOrder, rank: int, entry: Entry) -> Entry | None:
    """Return the other side of a message; None if there is none, or it is not known which it is."""
    peer = entry.signature.peer
    if peer is None or not _can_be_counted(group, rank, peer):
        return None
    sides, ordinal = _other_sides(group, rank, entry, peer), _ordinal(group, rank, entry)
    is_known = ordinal <= len(sides) and all(one.signature.peer is not None for one in sides)
    return sides[ordinal - 1] if is_known else None


def _other_sides(group: GroupOrder, rank: int, entry: Entry, peer: int) -> list[Entry]:
    (opposite,) = set(POINT_TO_POINT) - {entry.signature.op}
    return [
        one
        for one in group.windows.get(peer, ())
        if one.signature.op == opposite and one.signature.peer in (rank, None) and _have_one_tag(group, one, entry)
    ]


def _can_be_counted(group: GroupOrder, rank: int, peer: int) -> bool:
    has_none = not group.windows.get(peer) and not group.latest.get(peer)
    return _is_known_from_start(group, rank) and (has_none or _is_known_from_start(group, peer))


def _have_one_tag(group: GroupOrder, one: Entry, other: Entry) -> bool:
    return group.backend.startswith("nccl") or one.signature.tag == other.signature.tag


def _is_known_from_start(group: GroupOrder, rank: int) -> bool:
    window = group.windows.get(rank, ())
    return bool(window) and window[0].number == 1 and len(window) == window[-1].number


def _ordinal(group: GroupOrder, rank: int, entry: Entry) -> int:
    """Return the number of a message among those of its rank with the same direction, peer and tag, from 1."""
    return sum(
        one.number <= entry.number
        and (one.signature.op, one.signature.peer) == (entry.signature.op, entry.signature.peer)
        and _have_one_tag(group, one, entry)
        for one in group.windows.get(rank, ())
    )
