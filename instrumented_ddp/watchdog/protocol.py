"""The protocol between the watchdogs of a job: messages, states, and the transitions between these, without any I/O.

A rank is idle until somebody raises an alarm. Alarms are numbered, and of several ranks that raise alarm N the first
one counts; all others poll for N + 1 whenever they wake up. Each rank then publishes a snapshot of its state. The judge
is the lowest rank that is able to, and not the rank that raised the alarm, because many raise it at the same time. It
collects the snapshots and publishes an outcome, which every rank reports for itself. If the job can't continue, all
ranks stop together: the judge waits for the others to acknowledge the outcome, and they for its word to stop.

``docs/diagnosis.md`` has the diagram. Every function here takes a ``Participant`` and what was read (time, messages),
and returns the next ``Participant``, with the actions that the caller must carry out. Nothing reads a clock or a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Literal

from instrumented_ddp.watchdog.progress import DEAD_RANK_STALL_LIMIT_S, STARTUP_NOTICE_S, ProgressTracker
from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.order_difference import NO_POSITION, EntryDifference
from overlapscope.diagnosis.rank_snapshot import RankSnapshot
from overlapscope.diagnosis.replica_drift import PassSummary
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.json_files import from_json, to_json

COLLECT_TIMEOUT_S: Final = 1.2
"""Time in seconds within which every rank that wakes up has published its snapshot."""
COLLECT_REPLICAS_TIMEOUT_S: Final = 4.0
"""The same in seconds where replicas differ: the job goes on meanwhile, and who is blamed depends on every rank."""
ELECTION_INTERVAL_S: Final = 0.7
"""Time in seconds that each rank leaves to the one before it to become the judge."""
INVESTIGATION_TIMEOUT_S: Final = 6.0
ACKNOWLEDGE_TIMEOUT_S: Final = 1.0
"""Time in seconds that the judge waits for the others to acknowledge the outcome before the job is stopped."""

_MAX_ELECTION_INTERVALS: Final = 3
_STOP_TIMEOUT_S: Final = 1.5 * ACKNOWLEDGE_TIMEOUT_S
"""Time in seconds that the others wait for the judge's word to stop."""
_RETRACTABLE_KINDS: Final = (
    "stuck",
    "waits for data",
    "holds the GIL",
    "stopped",
    "gradients never ready",
    "uneven inputs",
)
"""Kinds of verdict that are retracted if the job continues."""
_RETRACTABLE_IF_LIKELY: Final = ("failed", "out of memory")
"""Such kinds if the rank has survived its exception, so that it may only be likely that it holds up the others."""


# -- messages: serialized as JSON ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogHead:
    """How far a rank is in a group's log, with the running hashes there."""

    latest: int
    hash: int
    names_hash: int
    batch: int = NO_POSITION
    """Batch number of the latest entry, if that is a bucket."""


@dataclass(frozen=True, kw_only=True)
class EntriesRequest:
    """A request to a neighbor for some of its log entries."""

    number: int
    """Number of the request, by which its reply is recognized."""
    group: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class EntriesReply:
    """The log entries that a neighbor has requested."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    """Rows of the log, with the columns of ``COMPARED_DTYPE``."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank publishes for its neighbors periodically: a ``RankSnapshot`` without excerpts of its logs."""

    evidence: RankEvidence
    """Evidence that is cheap to gather; its liveness is ``ended`` or ``failed`` in the final heartbeat."""
    host_id: str
    """Identity of the host: processes that have it in common see each other in /proc, and share a clock."""
    start_ticks: int
    """Start time of the process in clock ticks, which identifies it together with its pid."""
    time_ns: int
    dumps_stacks: bool = False
    """True if faulthandler dumps stacks on a signal in this process."""
    heads: dict[str, LogHead] = field(default_factory=dict)
    """Latest log entries, by group."""
    requests: dict[int, EntriesRequest] = field(default_factory=dict)
    """Requests to neighbors, by the rank that is asked."""
    replicas: dict[str, PassSummary] = field(default_factory=dict)
    """Latest fingerprints of each model, by key."""

    created_groups: dict[str, int] = field(default_factory=dict)
    """Digests of the lists of ranks with which the latest process groups were made, by name."""

    @property
    def is_final(self) -> bool:
        """Return whether the rank has said how it ended: nothing follows."""
        return self.evidence.liveness in ("ended", "failed")


@dataclass(frozen=True, kw_only=True)
class DivergenceLocation:
    """A divergence: the entry at which the ranks of a group begin to differ, found while the job was running."""

    group: str
    difference: EntryDifference


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A condition on one rank that makes all ranks investigate."""

    by: int
    why: Literal[
        "failure",
        "not reduced",
        "stall",
        "stall timeout",
        "difference",
        "replicas differ",
        "groups differ",
        "not finite",
    ]
    """Reason of the alarm; ``stall timeout``: the stall is so long that the job may be stopped for it."""
    divergence: DivergenceLocation | None = None
    """Location of the divergence, if that is the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an investigation, as published by the judge."""

    judge: int
    verdict: Verdict
    message: str
    """Complete text of the report."""
    listening: tuple[str, ...] = ()
    """Listening endpoints of all ranks, if the job may have to be stopped."""
    undecided_time_ns: int | None = None
    """Remaining time until a stall counts as a fault, if it doesn't by now: ``Facts.undecided_time_ns``."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The messages that one rank writes and reads in one exchange with the others."""

    writes: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, str] = field(default_factory=dict)
    """Messages under keys that only the first rank to claim them may write."""
    keys_to_poll: Sequence[str] = ()


def heartbeat_key(rank: int) -> str:
    """Return the key of a rank's heartbeat."""
    return f"heartbeat.{rank}"


# -- actions: what the caller of a transition has to do ------------------------------------------------------------


@dataclass(frozen=True)
class Publish:
    """Write a message at once."""

    key: str
    value: str


@dataclass(frozen=True)
class Judge:
    """Judge from everything known, and pass the outcome to ``conclude``."""


@dataclass(frozen=True)
class ReportFault:
    """Report a fault that was not reported before."""

    outcome: Outcome


@dataclass(frozen=True)
class RetractReport:
    """Retract the report of a fault: the job has gone on since, so it was slow, not stuck."""

    fault: tuple[Any, ...]
    was_judge: bool


@dataclass(frozen=True)
class LogSlow:
    """Log that a rank is slow."""

    verdict: Verdict


@dataclass(frozen=True)
class LogMayContinue:
    """Log that a job with a fault may continue, and after which stall it is stopped."""

    limit_s: float


@dataclass(frozen=True)
class LogUnreachable:
    """Log the position of this rank, as the others can't be reached."""


@dataclass(frozen=True)
class Abort:
    """Abort the training of this process: every rank that answered knows why."""

    outcome: Outcome


Action = Publish | Judge | ReportFault | RetractReport | LogSlow | LogMayContinue | LogUnreachable | Abort


# -- states ---------------------------------------------------------------------------------------------------------


class State(Enum):
    """State of one rank in the protocol."""

    IDLE = "idle"
    INVESTIGATING = "investigating"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a rank has observed of itself at one time."""

    now_s: float
    tracker: ProgressTracker
    progress: int = 0
    """Count of steps, else of collectives."""
    has_advanced: bool = False
    """True if anything has happened since the last observation."""
    in_collective_s: float | None = None
    """How long the rank has been in a collective that has not ended; None if it is in none."""
    is_failing: bool = False
    """True if an exception ends the process, which waits until the others know."""
    has_unreduced_gradients: bool = False
    has_non_finite_weights: bool = False
    is_neighbor_gone: bool = False
    """True if the process of a neighbor ended without saying how."""
    has_got_past: bool = False
    """True if the collective of the latest report that can be retracted has completed on this rank."""

    @property
    def idle_s(self) -> float:
        """Return for how long nothing has happened on this rank."""
        return self.tracker.idle_s(self.now_s)


@dataclass(frozen=True, kw_only=True)
class Investigation:
    """One investigation, as seen by one rank."""

    number: int
    """Number of the alarm."""
    alarm: Alarm
    began_s: float
    is_judge: bool = False
    snapshots: Mapping[int, RankSnapshot] = field(default_factory=dict)
    """Snapshots that the judge has read, by rank."""
    previous_snapshots: Mapping[int, RankSnapshot] = field(default_factory=dict)
    """Snapshots of the previous investigation, of ranks without one in this: they may be gone now."""
    heartbeats: Mapping[int, Heartbeat] = field(default_factory=dict)
    """Latest heartbeats of ranks without a snapshot."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What one rank has reported so far."""

    faults: frozenset[tuple[Any, ...]] = frozenset()
    unreduced: bool = False
    non_finite: bool = False
    unreachable: bool = False
    slow: tuple[Any, ...] | None = None
    """Slow rank and step that were logged last."""
    retractable: RetractReport | None = None
    """Retraction of the latest report of a kind that is retracted if the job continues."""
    waits_in: tuple[str, int] | None = None
    """Group and number of the collective that ``retractable`` says ranks wait in."""
    progress: int = 0
    """Progress of this rank when ``retractable`` was reported."""


@dataclass(frozen=True, kw_only=True)
class Participant:
    """One rank's part in the protocol."""

    rank: int
    world_size: int
    stall_timeout_s: float | None = None
    """Minimum stall in seconds before a possibly slow job is stopped; faults that are certain stop it at once.

    None: the job is never stopped.
    """
    state: State = State.IDLE
    alarms: int = 0
    """Number of alarms so far, of all ranks together."""
    pending_alarm: Alarm | None = None
    """Alarm that this rank has reason to raise."""
    investigation: Investigation | None = None
    """The current investigation; while stopping, the one that led to it. None if idle."""
    published: tuple[int, bool] | None = None
    """Number of the investigation whose snapshot is published, and whether the process was failing by then."""
    divergences: tuple[DivergenceLocation, ...] = ()
    """Known divergences, at most one per group."""
    outcome: Outcome | None = None
    """Why the job is stopped; None unless stopping."""
    awaited: frozenset[str] = frozenset()
    """While stopping, the keys of messages to wait for."""
    since_s: float = 0.0
    """While stopping, the time at which that began."""
    is_failure_known: bool = False
    """True if a failing process need not wait any longer: the others know, or can't be told."""
    no_alarm_until_idle_s: float = 0.0
    """Idle time in seconds up to which the stall is known, so that no alarm is raised for it again."""
    no_stop_until_idle_s: float = 0.0
    """Idle time in seconds up to which the stall is known to be no reason to stop the job."""
    reported: Reported = Reported()


Step = tuple[Participant, list[Action]]
"""Result of a transition: the next participant, and the actions to carry out."""


# -- transitions by what this rank observes -------------------------------------------------------------------------


def observe(me: Participant, seen: Observation) -> Step:
    """Process an observation of this rank: retract a report after progress, and detect a reason for an alarm.

    In a job's last step no other step follows: a report is retracted as well when what ranks waited in has completed.
    """
    actions: list[Action] = []
    if seen.has_advanced and (me.no_alarm_until_idle_s or me.no_stop_until_idle_s):
        me = replace(me, no_alarm_until_idle_s=0.0, no_stop_until_idle_s=0.0)
    retractable = None if me.state is State.STOPPING or seen.is_failing else me.reported.retractable
    if retractable is not None and (seen.has_got_past or seen.progress > me.reported.progress):
        me = replace(me, reported=Reported(slow=me.reported.slow))
        actions.append(retractable)
    if me.state is State.IDLE and me.pending_alarm is None:
        alarm = detect_alarm(me, seen)
        if alarm is not None:
            reported = replace(
                me.reported,
                unreduced=me.reported.unreduced or alarm.why == "not reduced",
                non_finite=me.reported.non_finite or alarm.why == "not finite",
            )
            me = replace(me, reported=reported, pending_alarm=alarm)
    return me, actions


def detect_alarm(me: Participant, seen: Observation) -> Alarm | None:
    """Return the alarm that this rank has reason to raise; None if there is none."""
    if seen.is_failing and not me.is_failure_known:
        return Alarm(by=me.rank, why="failure")
    if seen.has_unreduced_gradients and not me.reported.unreduced:
        return Alarm(by=me.rank, why="not reduced")
    if seen.has_non_finite_weights and not me.reported.non_finite:
        return Alarm(by=me.rank, why="not finite")
    if seen.in_collective_s is None:
        return None
    stalled_s = min(seen.idle_s, seen.in_collective_s)
    if me.stall_timeout_s is not None:
        stop_limit_s = seen.tracker.long_stall_s(me.stall_timeout_s)
        if stalled_s >= max(stop_limit_s, me.no_stop_until_idle_s):
            return Alarm(by=me.rank, why="stall timeout")
    limit_s = DEAD_RANK_STALL_LIMIT_S if seen.is_neighbor_gone else seen.tracker.notice_limit_s
    return Alarm(by=me.rank, why="stall") if stalled_s >= max(limit_s, me.no_alarm_until_idle_s) else None


def add_divergences(me: Participant, found: Iterable[DivergenceLocation]) -> Participant:
    """Note divergences that this rank has found, and raise an alarm for the last of them."""
    for divergence in found:
        me = replace(
            _with_divergence(me, divergence),
            pending_alarm=Alarm(by=me.rank, why="difference", divergence=divergence),
        )
    return me


def _with_divergence(me: Participant, divergence: DivergenceLocation) -> Participant:
    if any(known.group == divergence.group for known in me.divergences):
        return me
    return replace(me, divergences=(*me.divergences, divergence))


# -- messages to exchange, and transitions by the replies ------------------------------------------------------------


def messages_of(me: Participant, now_s: float) -> Messages:
    """Return the messages to exchange in this state, apart from this rank's heartbeat and snapshot."""
    case = me.investigation
    if case is None:
        key = f"alarm.{me.alarms + 1}"
        claims = {} if me.pending_alarm is None else {key: to_json(me.pending_alarm)}
        return Messages(claims=claims, keys_to_poll=[key])
    if me.outcome is not None:
        is_judge = me.outcome.judge == me.rank
        writes = {} if is_judge else {f"stop.{case.number}.{me.rank}": "acknowledged"}
        return Messages(writes=writes, keys_to_poll=sorted(me.awaited))
    if case.is_judge:
        keys = [
            key
            for rank in missing_ranks(me)
            for key in (_snapshot_key(case.number, rank), _snapshot_key(case.number - 1, rank), heartbeat_key(rank))
        ]
        return Messages(keys_to_poll=keys)
    # Ranks apply as judge one after another, so that the lowest wins.
    turn_s = case.began_s + ELECTION_INTERVAL_S * min(me.rank, _MAX_ELECTION_INTERVALS)
    claims = {f"judge.{case.number}": str(me.rank)} if now_s >= turn_s else {}
    return Messages(claims=claims, keys_to_poll=[f"outcome.{case.number}"])


def snapshot_key_due(me: Participant, *, is_failing: bool) -> str | None:
    """Return the key under which this rank must publish its snapshot; None if it has, and has not failed since."""
    if me.state is not State.INVESTIGATING or me.published == (me.alarms, is_failing):
        return None
    return _snapshot_key(me.alarms, me.rank)


def on_published(me: Participant, *, is_failing: bool) -> Participant:
    """Note that this rank's snapshot was published."""
    return replace(me, published=(me.alarms, is_failing))


def on_replies(me: Participant, replies: Mapping[str, bytes], seen: Observation) -> Step:
    """Process the replies to ``messages_of``."""
    case = me.investigation
    if case is None:
        alarm = replies.get(f"alarm.{me.alarms + 1}")
        return (me if alarm is None else _begin_investigation(me, from_json(Alarm, alarm), seen.now_s)), []
    if me.outcome is not None:
        return replace(me, awaited=me.awaited - replies.keys()), []
    if replies.get(f"judge.{case.number}") == str(me.rank).encode():
        case = replace(case, is_judge=True)
    if case.is_judge:
        case = _with_answers(case, replies, missing_ranks(me))
    me = replace(me, investigation=case)
    outcome = replies.get(f"outcome.{case.number}")
    return (me, []) if outcome is None else conclude(me, from_json(Outcome, outcome), seen)


def on_no_reply(me: Participant) -> Participant:
    """Note that an exchange has failed: what this rank wrote may be lost, and nobody can be waited for."""
    return replace(me, published=None, awaited=frozenset())


def on_unreachable(me: Participant, seen: Observation) -> Step:
    """React to a store that does not answer and that nothing can replace: every rank is on its own."""
    if seen.is_failing:
        return replace(me, is_failure_known=True), []
    if me.reported.unreachable or detect_alarm(me, seen) is None:
        return me, []
    return replace(me, reported=replace(me.reported, unreachable=True)), [LogUnreachable()]


def _begin_investigation(me: Participant, alarm: Alarm, now_s: float) -> Participant:
    me = replace(
        me,
        state=State.INVESTIGATING,
        alarms=me.alarms + 1,
        pending_alarm=None,
        investigation=Investigation(number=me.alarms + 1, alarm=alarm, began_s=now_s),
    )
    return me if alarm.divergence is None else _with_divergence(me, alarm.divergence)


def _with_answers(case: Investigation, replies: Mapping[str, bytes], missing: Iterable[int]) -> Investigation:
    snapshots, previous = dict(case.snapshots), dict(case.previous_snapshots)
    heartbeats = dict(case.heartbeats)
    for rank in missing:
        if (text := replies.get(_snapshot_key(case.number, rank))) is not None:
            snapshots[rank] = from_json(RankSnapshot, text)
        elif (text := replies.get(_snapshot_key(case.number - 1, rank))) is not None:
            previous[rank] = from_json(RankSnapshot, text)
        if (text := replies.get(heartbeat_key(rank))) is not None:
            heartbeats[rank] = from_json(Heartbeat, text)
    return replace(case, snapshots=snapshots, previous_snapshots=previous, heartbeats=heartbeats)


def missing_ranks(me: Participant) -> list[int]:
    """Return the ranks whose snapshots have not been read in the current investigation."""
    known = () if me.investigation is None else me.investigation.snapshots
    return [rank for rank in range(me.world_size) if rank not in known]


def _snapshot_key(number: int, rank: int) -> str:
    return f"snapshot.{number}.{rank}"


# -- transitions by time ---------------------------------------------------------------------------------------------


def advance(me: Participant, now_s: float, unresponsive: Iterable[int] = ()) -> Step:
    """Go on in an investigation or a stop, as far as time allows.

    Args:
        unresponsive: ranks that are known not to publish a snapshot any more, as their processes are gone or stopped.
    """
    case = me.investigation
    if case is None:
        return me, []
    if me.outcome is not None:
        return _stop(me, case, me.outcome, now_s)
    elapsed_s = now_s - case.began_s
    timeout_s = COLLECT_REPLICAS_TIMEOUT_S if case.alarm.why == "replicas differ" else COLLECT_TIMEOUT_S
    if case.is_judge and (elapsed_s >= timeout_s or set(missing_ranks(me)) <= set(unresponsive)):
        return me, [Judge()]
    return (_to_idle(me) if elapsed_s >= INVESTIGATION_TIMEOUT_S else me), []


def conclude(me: Participant, outcome: Outcome, seen: Observation) -> Step:
    """End the investigation with its outcome: report it, and stop the job if it can't or must not continue."""
    case = me.investigation
    assert case is not None
    actions: list[Action] = []
    if outcome.judge == me.rank:
        actions.append(Publish(f"outcome.{case.number}", to_json(outcome)))
    me, reports = _report(_to_idle(me), outcome, seen)
    actions += reports
    if seen.is_failing:  # it exits anyway
        return replace(me, is_failure_known=True), actions
    stall_timeout_s = me.stall_timeout_s
    if stall_timeout_s is None:
        return me, actions
    verdict, is_judge = outcome.verdict, outcome.judge == me.rank
    if verdict.is_fault and (verdict.certainty == "certain" or case.alarm.why == "stall timeout"):
        others = {f"stop.{case.number}.{rank}" for rank in case.snapshots if rank != me.rank}
        awaited = frozenset(others if is_judge else {f"stop.{case.number}"})
        me = replace(me, state=State.STOPPING, investigation=case, outcome=outcome, awaited=awaited, since_s=seen.now_s)
    elif is_judge and any(isinstance(action, ReportFault) for action in reports):
        actions.append(LogMayContinue(seen.tracker.long_stall_s(stall_timeout_s)))
    return me, actions


def _report(me: Participant, outcome: Outcome, seen: Observation) -> Step:
    """Report an outcome, and limit when the same stall is investigated again."""
    verdict, is_judge, reported = outcome.verdict, outcome.judge == me.rank, me.reported
    if not verdict.is_fault:
        undecided_s = None if outcome.undecided_time_ns is None else outcome.undecided_time_ns / 1e9
        next_check_s = seen.tracker.next_check_idle_s(seen.idle_s, undecided_s)
        # During startup the rank that others wait for was reported early: no reason to wait longer than usual.
        no_alarm_s = seen.idle_s + STARTUP_NOTICE_S if seen.tracker.is_starting else next_check_s
        me = replace(me, no_stop_until_idle_s=next_check_s, no_alarm_until_idle_s=no_alarm_s)
        # Once per step: the judge may be the slow one itself, and continue meanwhile.
        slow = (verdict.concerned[:1], verdict.step)
        if not is_judge or verdict.kind != "slow" or slow == reported.slow:
            return me, []
        return replace(me, reported=replace(reported, slow=slow)), [LogSlow(verdict)]
    me = replace(me, no_alarm_until_idle_s=float("inf"))
    fault = identify_fault(verdict)
    if not reported.faults.isdisjoint({fault, (*fault[:-1], "certain")}):  # it is reported again once it is certain
        return me, []
    reported = replace(reported, faults=reported.faults | {fault})
    is_suspicion = verdict.kind in _RETRACTABLE_IF_LIKELY and verdict.certainty != "certain"
    if verdict.kind in _RETRACTABLE_KINDS or is_suspicion:
        where = None if verdict.group is None or verdict.number is None else (verdict.group, verdict.number)
        retraction = RetractReport(fault, is_judge)
        reported = replace(reported, retractable=retraction, waits_in=where, progress=seen.progress)
    return replace(me, reported=reported), [ReportFault(outcome)]


def identify_fault(verdict: Verdict) -> tuple[Any, ...]:
    """Return what identifies a fault, so that it is reported once: its certainty last."""
    return (verdict.kind, verdict.group, verdict.number, *verdict.named, verdict.certainty)


def _stop(me: Participant, case: Investigation, outcome: Outcome, now_s: float) -> Step:
    """Abort once the others know why, or after a while.

    A rank that exits closes its connections, and perhaps the store: a rank that does not know the outcome yet would
    report only that.
    """
    is_judge = outcome.judge == me.rank
    if me.awaited and now_s - me.since_s < (ACKNOWLEDGE_TIMEOUT_S if is_judge else _STOP_TIMEOUT_S):
        return me, []
    word: list[Action] = [Publish(f"stop.{case.number}", "now")] if is_judge else []
    return replace(_to_idle(me), is_failure_known=True), [*word, Abort(outcome)]


def _to_idle(me: Participant) -> Participant:
    return replace(me, state=State.IDLE, investigation=None, outcome=None, awaited=frozenset())
