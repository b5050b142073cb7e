"""Facts derived directly from the evidence and shared by most rules: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from overlapscope.diagnosis.evidence import Entry, Evidence, GroupOrder, RankEvidence, ReportedVerdict
from overlapscope.diagnosis.failures import is_consequence, is_timeout
from overlapscope.diagnosis.messages import find_messages_in_flight, is_answered, mark_failed
from overlapscope.diagnosis.stall_timeout import BUSY_STALL_TIMEOUT_NS, is_busy, long_stall_timeout_ns, stall_timeout_ns
from overlapscope.trace.collective_log import POINT_TO_POINT, UNEVEN_INPUTS

# Bucket sums that strategies build from sends and receives: the round in which a rank waits, and for whom.
#
# Each rank numbers its own messages, so the two sides of one are matched by its purpose: the sum, which has the same
# number on all ranks, the phase and the round. A message is posted on both sides before any of it is transferred. So
# a rank that has posted its side waits for one that has not, and never for one that has.


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
        point_to_point_orders: messages of several groups, including this one.
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
        messages: messages of the rank, from ``find_open_messages``. They are waited for in order, so the state of the
        later
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


_END_REPORTS: Final = ("killed", "failed", "out of memory", "slow", "healthy", "interrupted", "cannot tell")
"""Kinds of reports that don't mean that a job hung."""


@dataclass(frozen=True)
class Wait:
    """A rank that can't continue until others enter a collective."""

    rank: int
    group: GroupOrder
    entry: Entry
    """The collective it waits in."""
    late: tuple[int, ...]
    """Members of the group that have not reached this entry; for a send or a recv, the peer."""
    is_point_to_point: bool = False

    def first_missed_by(self, ranks: Iterable[int]) -> Entry:
        """Return the first collective that these ranks never entered although others wait for them there."""
        if self.is_point_to_point:
            return self.entry
        late = set(ranks) & set(self.late)
        number = min((self.group.latest.get(rank, 0) + 1 for rank in late), default=self.entry.number)
        return next((e for e in self.group.windows[self.rank] if e.number == number), self.entry)


class Facts:
    """The evidence, and the facts derived from it: who waits for whom, and who is stalled, slow or blocked."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.ranks = evidence.ranks

    @cached_property
    def world(self) -> tuple[int, ...]:
        """Return all ranks that are expected or present."""
        return tuple(sorted({*self.evidence.expected_ranks, *self.ranks}))

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Return the expected ranks that left nothing."""
        return tuple(rank for rank in self.world if rank not in self.ranks)

    def ranks_with_liveness(self, *liveness: str) -> tuple[int, ...]:
        """Return the ranks in one of these states."""
        return tuple(rank for rank, one in sorted(self.ranks.items()) if one.liveness in liveness)

    @cached_property
    def unrecorded(self) -> tuple[int, ...]:
        """Return ranks whose recording ended before they did: what they did afterwards is unknown."""
        return tuple(rank for rank, one in sorted(self.ranks.items()) if one.unrecorded_because is not None)

    @cached_property
    def has_uneven_inputs(self) -> bool:
        """Return True if ranks are or were under ``join()``, as the latest entries of their logs show."""
        windows = (window for group in self.evidence.groups for window in group.windows.values())
        return any(entry.flags & UNEVEN_INPUTS for window in windows for entry in window)

    def is_uncertain(self, rank: int) -> bool:
        """Return True if a rank may have launched more than its logs show."""
        return any(rank in group.uncertain for group in self.evidence.groups)

    @cached_property
    def possibly_waiting(self) -> tuple[int, ...]:
        """Return ranks in a collective without known late ranks that an unrecorded rank may not have reached."""
        return tuple(
            rank
            for rank, (group, entry) in sorted(self.blocked.items())
            if rank not in self.waiting
            and any(other in group.ranks and group.latest.get(other, 0) < entry.number for other in self.unrecorded)
        )

    @cached_property
    def is_from_dumps(self) -> bool:
        """Return True if the evidence is from dumps, so that only launches are known."""
        return bool(self.ranks) and len(self.ranks_with_liveness("dumped")) == len(self.ranks)

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Return which ranks wait for which others."""
        return tuple(wait for rank in sorted(self.ranks) if (wait := self._wait_of(rank)) is not None)

    @cached_property
    def blocked(self) -> dict[int, tuple[GroupOrder, Entry]]:
        """Return the collective that each rank is in, whether or not it waits for another rank."""
        return {rank: found for rank in self.ranks if (found := self._blocked_in(rank)) is not None}

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Return the ranks that wait for another."""
        return tuple(wait.rank for wait in self.waits)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """Return the ranks that others wait for and that wait for nobody: they hold up the job.

        A device that is not done with what its host has launched may be what that host waits for, rather than another
        rank.
        """
        late = {rank for wait in self.waits for rank in wait.late}
        on_device = {rank for rank, (group, _) in self.blocked.items() if runs_on_device(group)}
        held_up = late - set(self.waiting) - on_device
        return tuple(sorted(rank for rank in held_up if not self._waits_for_the_network(rank)))

    @cached_property
    def device_waits(self) -> tuple[Wait, ...]:
        """Return the waits of devices for devices that have not reached a collective their hosts launched.

        Only collectives that took so long that the progress of their devices was checked.
        """
        waits = []
        for group in self.evidence.groups:
            first = group.oldest_incomplete
            late = [rank for rank, entry in first.items() if entry.is_reached is False and self.is_device_busy(rank)]
            waits += [
                Wait(rank, group, entry, ahead)
                for rank, entry in first.items()
                if entry.is_reached and (ahead := tuple(other for other in late if first[other].number <= entry.number))
            ]
        return tuple(waits)

    @cached_property
    def late_devices(self) -> tuple[int, ...]:
        """Return the ranks whose devices hold up the devices of others."""
        return tuple(sorted({rank for wait in self.device_waits for rank in wait.late}))

    def awaited_in_new_group(self, rank: int) -> tuple[int, ...]:
        """Return members of the group that ``rank`` is creating in ``new_group`` that have called it less often."""
        own = self.ranks[rank].new_group_calls
        calls = {other: one.new_group_calls for other, one in self.ranks.items()}
        return tuple(
            other
            for other in self.ranks[rank].creating_group
            if own is not None and (its := calls.get(other)) is not None and its < own
        )

    def wait_for(self, ranks: Iterable[int]) -> Wait | None:
        """Return the first collective in which any rank waits for one of these ranks."""
        wanted = set(ranks)
        waits = [wait for wait in self.waits if wanted & set(wait.late)]
        return min(waits, key=lambda wait: (wait.entry.number, wait.rank), default=None)

    def first_open(self, rank: int) -> tuple[GroupOrder, Entry]:
        """Return the collective that a rank is blocked in: of those its host launched ahead, where its device is."""
        group, entry = self.blocked[rank]
        if not runs_on_device(group):
            return group, entry
        return group, group.oldest_incomplete.get(rank, entry)

    def latest(self, group: GroupOrder, rank: int) -> Entry | None:
        """Return the latest entry of a rank, if available; for a sum made of messages, the sum itself."""
        window = group.windows.get(rank, ())
        if not window or window[-1].number != group.latest.get(rank):
            return None
        return next((entry for entry in reversed(window) if not is_segment(entry)), None)

    def latest_numbers(self, group: GroupOrder, without: tuple[int, ...] = ()) -> dict[int, int]:
        """Return the number of the latest entry of each rank of a group that left something; 0 if it has none."""
        known = [rank for rank in group.ranks if rank in self.ranks and rank not in group.uncertain]
        return {rank: group.latest.get(rank, 0) for rank in known if rank not in without}

    def messages_of(self, rank: int) -> tuple[SegmentMessage, ...]:
        """Return the messages in which a rank may be waiting, of the first incomplete sum of a bucket."""
        entries = ((group, entry) for group in self.evidence.groups for entry in group.windows.get(rank, ()))
        sums = [(group, entry) for group, entry in entries if is_bucket_sum(entry) and entry.state != "completed"]
        if rank not in self.blocked or not sums:
            return ()
        group, first = min(sums, key=lambda one: one[1].announced_ns)
        return find_open_messages(group, self.evidence.point_to_point_orders, rank, first.number)

    def is_stuck(self, rank: int) -> bool:
        """Return True if a rank has stalled for longer than a slow step explains; always for a job that has ended."""
        one = self.ranks.get(rank)
        if (one is not None and one.liveness in ("gone", "failed", "ended")) or rank in self.gave_up_ns:
            return True
        if one is None or one.idle_ns is None:
            return not self.evidence.is_live or (one is not None and one.liveness == "stopped")
        return self.stalled_ns(one) >= stall_timeout_ns(one)

    def stalled_ns(self, one: RankEvidence) -> int:
        """Return how long a rank has stalled; if others of a live job wait for it, at most as long as they have waited.

        Ranks report their positions at different moments: a rank that was late may since have passed those that waited.
        """
        idle_ns = one.idle_ns or 0
        return min(idle_ns, self._held_up_ns.get(one.rank, idle_ns)) if self.evidence.is_live else idle_ns

    def held_up_ns(self, rank: int) -> int:
        """Return for how long others have waited for a rank, whatever it was doing; 0 if that is unknown."""
        return self._held_up_ns.get(rank, 0)

    @cached_property
    def _held_up_ns(self) -> dict[int, int]:
        """Return, for each rank that waits for nobody, the longest stall among the ranks that wait for it."""
        waits = [wait for wait in self.waits if self.ranks[wait.rank].idle_ns is not None]
        return self._longest_by_awaited((wait, self.waited_ns(wait)) for wait in waits)

    @cached_property
    def gave_up_ns(self) -> dict[int, int]:
        """Return, for each rank that waits for nobody, how long another waited for it until its collective timed out.

        That is too long, whatever the rank was doing: nobody waits for it any more.
        """
        return self._longest_by_awaited(self._timed_out)

    @property
    def timed_out_ranks(self) -> tuple[int, ...]:
        """Return the ranks that waited for others until their collective timed out."""
        return tuple(wait.rank for wait, _ in self._timed_out)

    @cached_property
    def _timed_out(self) -> list[tuple[Wait, int]]:
        return [(wait, ns) for wait in self.waits if (ns := self._timed_out_after_ns(wait)) is not None]

    def waited_ns(self, wait: Wait) -> int:
        """Return how long a rank has waited in a collective: until it gave up, if it did."""
        entry, idle_ns = wait.entry, self.ranks[wait.rank].idle_ns or 0
        end_ns = entry.completed_ns if entry.state == "failed" else None
        return idle_ns if end_ns is None else max(idle_ns, end_ns - entry.announced_ns)

    def _timed_out_after_ns(self, wait: Wait) -> int | None:
        """Return how long a rank waited until its collective timed out; None if it did not."""
        one = self.ranks[wait.rank]
        failure = one.failure or (one.exit_call.caught if one.exit_call is not None else None)
        return self.waited_ns(wait) if wait.entry.state == "failed" and is_timeout(failure) else None

    def _longest_by_awaited(self, waits: Iterable[tuple[Wait, int]]) -> dict[int, int]:
        """Return the longest of the times that ranks have waited, by the rank that they waited for."""
        waiting, longest_ns = set(self.waiting), dict[int, int]()
        for wait, waited_ns in waits:
            for rank in {*wait.late} - waiting:
                longest_ns[rank] = max(waited_ns, longest_ns.get(rank, 0))
        return longest_ns

    @cached_property
    def undecided_time_ns(self) -> int | None:
        """Return how long until ranks that seem to hold up the job exceed their stall timeout.

        The first of the ranks that others wait for; else the last of all ranks, if all are in a collective. None if the
        job is over, the timeouts have passed, or the ranks are busy.
        """
        late = (*self.awaited, *self.late_devices)
        ranks = late or (self.blocked if len(self.blocked) == len(self.ranks) else ())
        quiet = [self.ranks[rank] for rank in ranks if rank in self.ranks and not self.is_only_slow(rank)]
        left_ns = [stall_timeout_ns(one) - self.stalled_ns(one) for one in quiet if one.idle_ns is not None]
        return (min if late else max)((ns for ns in left_ns if ns > 0), default=None)

    def was_reported_before(self, time_ns: int | None) -> bool:
        """Return True if a watchdog reported more than the end of a process before ``time_ns``; at any time if None."""
        reports = filter(_is_of_a_job_that_ran, self.evidence.reports)
        return any(time_ns is None or report.time_ns < time_ns for report in reports)

    def had_hung(self, rank: int) -> bool:
        """Return True if a rank had stalled for long, like others, when last heard from: its end came later."""
        one = self.ranks[rank]
        if rank not in self.waiting and rank not in self.awaited and rank not in self.late_devices:
            return False
        if one.idle_ns is not None and one.idle_ns >= stall_timeout_ns(one):
            return True
        failures_ns = [other.failure.time_ns for other in self.ranks.values() if other.failure]
        reports_ns = [report.time_ns for report in filter(_is_of_a_job_that_ran, self.evidence.reports)]
        return bool(reports_ns) and min(reports_ns) < min(failures_ns, default=max(reports_ns) + 1)

    def is_only_slow(self, rank: int) -> bool:
        """Return True if a rank of a live job or its device is busy, and not for as long as only endless loops are."""
        one = self.ranks.get(rank)
        if one is None or not self.evidence.is_live or rank in self.gave_up_ns:
            return False
        if not (is_busy(one) or self.is_device_busy(rank)):
            return False
        long_ns = long_stall_timeout_ns(BUSY_STALL_TIMEOUT_NS, one.step_time_ns, one.longest_recovered_stall_ns)
        return one.idle_ns is None or one.idle_ns < long_ns

    def is_device_busy(self, rank: int) -> bool:
        """Return True if a rank's device is known to be executing work launched before any incomplete collective."""
        if rank not in self.ranks or rank in self.unrecorded:
            return False
        groups = (*self.evidence.groups, *self.evidence.point_to_point_orders)
        first = [group.oldest_incomplete[rank] for group in groups if rank in group.oldest_incomplete]
        oldest = min(first, key=lambda entry: entry.announced_ns, default=None)
        return oldest is not None and oldest.is_reached is False and not any(entry.is_reached for entry in first)

    def _wait_of(self, rank: int) -> Wait | None:
        if rank not in self.blocked:
            return None
        group, entry = self.blocked[rank]
        if self.is_device_busy(rank):
            return None
        if entry.signature.op in POINT_TO_POINT:
            return self._wait_for_peer(rank, group, entry)
        late = self._late_in(group, rank, entry) or [one.peer for one in self.messages_of(rank) if not one.is_answered]
        late = [other for other in dict.fromkeys(late) if other not in self.unrecorded]
        return Wait(rank, group, entry, tuple(late)) if late else None

    def _late_in(self, group: GroupOrder, rank: int, entry: Entry) -> list[int]:
        others = [other for other in group.ranks if other != rank and other not in group.uncertain]
        late = [other for other in others if group.latest.get(other, 0) < entry.number]
        # A rank whose log is lost has entered every collective that others have completed.
        done = self._newest_done(group)
        return [other for other in late if other in group.latest or entry.number > done]

    def _waits_for_the_network(self, rank: int) -> bool:
        """Return True if a rank is alive and in the middle of a message that its peer has posted as well."""
        one = self.ranks.get(rank)
        is_there = one is not None and one.liveness in ("running", "sleeping")
        return is_there and is_in_transit(self.messages_of(rank))

    def _wait_for_peer(self, rank: int, group: GroupOrder, entry: Entry) -> Wait | None:
        """Return the wait for the peer of a send or a recv, unless the peer has launched its side of the message."""
        if entry.signature.role == "segment":
            answers = dict.fromkeys(_incomplete_in_round(group, rank, entry))
        else:
            messages = find_messages_in_flight(group, self.ranks[rank], entry)
            answers = {one: is_answered(group, rank, one) for one in messages}
        # One that is known to lack its other side is waited for; of others, that is only possible.
        for one in sorted(answers, key=lambda one: answers[one] is not False):
            if late := self._late_peers(rank, group, one, answers[one]):
                return Wait(rank, group, one, late, is_point_to_point=True)
        return None

    def _late_peers(self, rank: int, group: GroupOrder, message: Entry, answer: bool | None) -> tuple[int, ...]:
        """Return the ranks that a message waits for.

        A recv from any rank waits for all, if none of them can send: they are in collectives or messages with others.

        Args:
            answer: whether the peer has launched its side; if unknown, it has not unless it is in a message as well.
        """
        peer = message.signature.peer
        peers = (peer,) if peer is not None else tuple(other for other in group.ranks if other in self.ranks)
        others = tuple(other for other in peers if other != rank)
        if answer or set(others) & set(self.unrecorded):
            return ()
        if answer is None and any(self._may_talk_to(other, rank) for other in others):
            return ()
        if peer is None and not all(other in self.blocked or has_finished(self.ranks[other]) for other in others):
            return ()
        return others

    def _may_talk_to(self, peer: int, rank: int) -> bool:
        """Return True if a rank is in a send or a recv with another one."""
        _, other = self.blocked.get(peer, (None, None))
        return other is not None and other.signature.op in POINT_TO_POINT and other.signature.peer in (rank, None)

    def _newest_done(self, group: GroupOrder) -> int:
        return max((e.number for window in group.windows.values() for e in window if e.state == "completed"), default=0)

    def _blocked_in(self, rank: int) -> tuple[GroupOrder, Entry] | None:
        """Return the rank's latest collective if it is incomplete and the rank has not continued to other work."""
        one = self.ranks[rank]
        if one.liveness == "ended" or rank in self.unrecorded:
            return None
        groups = (*self.evidence.groups, *self.evidence.point_to_point_orders)
        latest = [(group, entry) for group in groups if (entry := self.latest(group, rank)) is not None]
        if not latest:
            return None
        group, entry = max(latest, key=lambda pair: pair[1].announced_ns)
        entry = mark_failed(entry, one)
        if entry.state == "completed":
            return None
        if runs_on_device(group):  # the device waits there, however far its host has run ahead
            return group, entry
        position = one.position
        has_gone_on = (
            position is not None
            and position.since_ns > entry.announced_ns
            and position.phase != "finalize"
            and not is_consequence(one.failure)
            and not (one.exit_call is not None and is_consequence(one.exit_call.caught))
        )
        return None if has_gone_on else (group, entry)


def _is_of_a_job_that_ran(report: ReportedVerdict) -> bool:
    """Return True if a watchdog reported more than the end of a process; a failure that is only likely ended none."""
    return report.kind not in _END_REPORTS or (report.kind in ("failed", "out of memory") and bool(report.alternative))


def _incomplete_in_round(group: GroupOrder, rank: int, latest: Entry) -> list[Entry]:
    """Return the latest send or recv of a rank and the incomplete ones launched with it: strategies launch several."""
    if latest.signature.role != "segment":
        return [latest]
    window = reversed(group.windows.get(rank, (latest,)))
    return [
        entry
        for entry in window
        if entry.state != "completed" and entry.signature.role == "segment" and entry.number <= latest.number
    ]


def runs_on_device(group: GroupOrder) -> bool:
    """Return True if hosts continue after launching a collective, and only their devices wait for others."""
    return group.backend.startswith("nccl")


def has_finished(one: RankEvidence) -> bool:
    """Return True if a rank ended without an error and without being signaled."""
    return one.liveness == "ended" and not one.exit_status and not one.was_signaled


def find_minority(sides: Iterable[Iterable[int]], members: int) -> tuple[int, ...]:
    """Return the ranks that differ from more than half of all members; with two ranks, none.

    Example: sides (0, 2) and (1,) of 3 members give (1,); sides (0, 1) and (2, 3) of 4 members give ().
    """
    parts = [set(ranks) for ranks in sides]
    largest = max(parts, key=len, default=set())
    if members < 3 or 2 * len(largest) <= members:
        return ()
    return tuple(sorted(set().union(*parts) - largest))
