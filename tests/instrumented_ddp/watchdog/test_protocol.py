"""The protocol of the watchdogs, played by several ranks over a dictionary and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest

from instrumented_ddp.watchdog.peer_channel import exchange_messages
from instrumented_ddp.watchdog.progress import ProgressTracker
from instrumented_ddp.watchdog.protocol import (
    ACKNOWLEDGE_TIMEOUT_S,
    COLLECT_REPLICAS_TIMEOUT_S,
    COLLECT_TIMEOUT_S,
    ELECTION_INTERVAL_S,
    INVESTIGATION_TIMEOUT_S,
    Abort,
    Action,
    Alarm,
    DivergenceLocation,
    Heartbeat,
    Judge,
    LogMayContinue,
    LogSlow,
    LogUnreachable,
    Messages,
    Observation,
    Outcome,
    Participant,
    Publish,
    ReportFault,
    RetractReport,
    State,
    Step,
    add_divergences,
    advance,
    conclude,
    detect_alarm,
    messages_of,
    missing_ranks,
    observe,
    on_no_reply,
    on_published,
    on_replies,
    on_unreachable,
    snapshot_key_due,
)
from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.order_difference import EntryDifference
from overlapscope.diagnosis.rank_snapshot import RankSnapshot
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.json_files import to_json

CERTAIN = Verdict(kind="killed", sentence="Rank 1 was killed.", blamed=(1,))
LIKELY = Verdict(kind="stuck", sentence="Rank 1 is stuck.", alternative="it is slow", suspected=(1,))
SLOW = Verdict(kind="slow", sentence="Rank 1 is slow.", concerned=(1,), step=20)
HEALTHY = Verdict(kind="healthy", sentence="Nothing is wrong.")
STEP_S = 0.5
STEPS = 20


@dataclass
class FakeStore:
    """A key-value store in memory."""

    content: dict[str, bytes] = field(default_factory=dict)

    def in_use(self):
        return nullcontext()

    def set(self, key: str, value: str) -> None:
        self.content[key] = value.encode()

    def get(self, key: str) -> bytes | None:
        return self.content.get(key)

    def claim(self, key: str, value: str) -> bytes:
        return self.content.setdefault(key, value.encode())

    def leave(self) -> None:
        """Nothing to do."""


@dataclass
class Rank:
    """One rank, with the same loop as ``Watchdog`` but for what it reads and writes."""

    job: Job
    me: Participant
    tracker: ProgressTracker = field(default_factory=ProgressTracker)
    progress: int = 0
    waits_since_s: float | None = None
    is_failing: bool = False
    has_unreduced_gradients: bool = False
    has_non_finite_weights: bool = False
    is_neighbor_gone: bool = False
    has_got_past: bool = False
    is_alive: bool = True
    is_connected: bool = True
    done: list[tuple[float, Action]] = field(default_factory=list)
    """Actions so far, and when."""

    def train(self, step: int) -> None:
        self.progress = step
        self.waits_since_s = None

    def wait_in_collective(self) -> None:
        self.waits_since_s = self.job.now_s

    def observation(self, *, has_advanced: bool = False) -> Observation:
        return Observation(
            now_s=self.job.now_s,
            tracker=self.tracker,
            progress=self.progress,
            has_advanced=has_advanced,
            in_collective_s=None if self.waits_since_s is None else self.job.now_s - self.waits_since_s,
            is_failing=self.is_failing,
            has_unreduced_gradients=self.has_unreduced_gradients,
            has_non_finite_weights=self.has_non_finite_weights,
            is_neighbor_gone=self.is_neighbor_gone,
            has_got_past=self.has_got_past,
        )

    def run(self) -> None:
        has_advanced = self.tracker.observe(self.job.now_s, self.progress, (self.progress, self.waits_since_s))
        seen = self.observation(has_advanced=has_advanced)
        self.follow(observe(self.me, seen))
        messages, writes = messages_of(self.me, seen.now_s), {}
        key = snapshot_key_due(self.me, is_failing=self.is_failing)
        if key is not None:
            writes[key] = to_json(RankSnapshot(evidence=RankEvidence(rank=self.me.rank)))
        replies = self.exchange(replace(messages, writes={**messages.writes, **writes}))
        if replies is not None:
            self.me = self.me if key is None else on_published(self.me, is_failing=self.is_failing)
            self.follow(on_replies(self.me, replies, seen))
        self.follow(advance(self.me, self.job.now_s, self.job.unresponsive))

    def exchange(self, messages: Messages) -> dict[str, bytes] | None:
        if self.is_connected:
            return exchange_messages(self.job.store, messages)
        self.me = on_no_reply(self.me)
        self.follow(on_unreachable(self.me, self.observation()))
        return None

    def follow(self, step: Step) -> None:
        self.me, actions = step
        for action in actions:
            self.done.append((self.job.now_s, action))
            if isinstance(action, Publish):
                self.exchange(Messages(writes={action.key: action.value}))
            elif isinstance(action, Judge):
                self.follow(conclude(self.me, self.job.judge(self.me), self.observation()))

    def did(self, kind: type) -> list[float]:
        """Return the times of one kind of action."""
        return [when for when, action in self.done if isinstance(action, kind)]


class Job:
    """Ranks that have trained for 20 steps of half a second, so that a stall is worth an alarm after 3 s."""

    def __init__(self, size: int, *, stall_timeout_s: float | None = None, steps: int = STEPS) -> None:
        self.now_s = 0.0
        self.store = FakeStore()
        self.unresponsive: set[int] = set()
        self.verdict: Callable[[Participant], Verdict] | Verdict = HEALTHY
        self.undecided_time_ns: int | None = None
        self.ranks = [
            Rank(self, Participant(rank=rank, world_size=size, stall_timeout_s=stall_timeout_s)) for rank in range(size)
        ]
        for step in range(steps):
            for rank in self.ranks:
                rank.train(step)
            self.pass_time(STEP_S)

    def judge(self, me: Participant) -> Outcome:
        verdict = self.verdict(me) if callable(self.verdict) else self.verdict
        return Outcome(judge=me.rank, verdict=verdict, message="", undecided_time_ns=self.undecided_time_ns)

    def pass_time(self, seconds: float, *, every_s: float = 0.1) -> None:
        for _ in range(round(seconds / every_s)):
            for rank in self.ranks:
                if rank.is_alive:
                    rank.run()
            self.now_s += every_s

    def stall(self, *waiting: int) -> float:
        """Let some ranks wait in a collective from now on; nobody advances. Return the time."""
        for rank in waiting:
            self.ranks[rank].wait_in_collective()
        return self.now_s

    def states(self) -> set[State]:
        return {rank.me.state for rank in self.ranks}

    def number_of_alarms(self) -> int:
        return sum(key.startswith("alarm.") for key in self.store.content)

    def judges(self) -> dict[str, bytes]:
        return {key: value for key, value in self.store.content.items() if key.startswith("judge.")}


def test_training_raises_no_alarm():
    job = Job(2, stall_timeout_s=5)
    assert job.states() == {State.IDLE}
    assert job.number_of_alarms() == 0
    assert [rank.done for rank in job.ranks] == [[], []]


def test_after_an_alarm_all_ranks_answer_one_judges_and_all_report():
    job = Job(3)
    job.verdict = LIKELY
    began_s = job.stall(0, 2)
    job.pass_time(2.9)
    assert job.number_of_alarms() == 0, "less than four steps and 3 s"
    job.pass_time(0.4)
    assert job.states() == {State.INVESTIGATING}
    assert job.ranks[0].me.published == (1, False)
    job.pass_time(0.4)
    assert job.judges() == {"judge.1": b"0"}
    assert job.states() == {State.IDLE}
    assert [len(rank.did(Judge)) for rank in job.ranks] == [1, 0, 0]
    assert all(began_s + 3 <= rank.did(ReportFault)[0] < began_s + 3.6 for rank in job.ranks)
    assert {key for key in job.store.content if key.startswith("snapshot")} == {f"snapshot.1.{n}" for n in range(3)}
    job.pass_time(30)
    assert job.number_of_alarms() == 1, "the stall is known"
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 1, 1]
    assert not any(rank.did(Abort) for rank in job.ranks), "the job is never stopped"


def test_weights_that_are_not_finite_are_reported_once():
    job = Job(3)
    job.verdict = LIKELY
    for rank in job.ranks:
        rank.has_non_finite_weights = True
    job.pass_time(10)
    assert b'"why":"not finite"' in job.store.content["alarm.1"]
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 1, 1]


def test_two_alarms_at_once_are_one_investigation():
    job = Job(4)
    job.verdict = LIKELY
    job.ranks[2].has_unreduced_gradients = True
    job.ranks[1].is_failing = True
    job.pass_time(0.5)
    assert job.number_of_alarms() >= 1
    alarm = job.store.content["alarm.1"]
    assert b'"why":"failure"' in alarm, "rank 1 came first"
    assert len([key for key in job.store.content if key.startswith("outcome.1")]) == 1
    job.pass_time(5)
    assert {len(rank.did(ReportFault)) for rank in job.ranks} == {1}, "the second finds the same"


def test_a_rank_that_dies_in_an_investigation_is_waited_for_briefly():
    job = Job(3)
    job.verdict = CERTAIN
    began_s = job.stall(0, 2)
    job.pass_time(3)
    job.ranks[1].is_alive = False  # before it has published its snapshot
    job.pass_time(2)
    waited_s = job.ranks[0].did(Judge)[0] - began_s - 3
    assert COLLECT_TIMEOUT_S - 0.2 < waited_s < COLLECT_TIMEOUT_S + 0.3
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 0, 1]


def test_a_rank_whose_process_is_known_to_be_gone_is_not_waited_for():
    job = Job(3)
    job.verdict = CERTAIN
    job.ranks[1].is_alive = False
    job.unresponsive = {1}
    job.ranks[0].is_neighbor_gone = True
    began_s = job.stall(0, 2)
    job.pass_time(2)
    assert 1 <= job.ranks[0].did(Judge)[0] - began_s < 1.5


@pytest.mark.parametrize(("late_s", "is_heard"), [(0.0, True), (2.5, True), (5.0, False)])
def test_a_rank_is_waited_for_longer_where_replicas_differ(late_s, is_heard):
    job = Job(3)
    heard = []

    def judge(me: Participant) -> Verdict:
        heard.extend(me.investigation.snapshots)
        return CERTAIN

    job.verdict = judge
    began_s = job.now_s
    job.ranks[0].me = replace(job.ranks[0].me, pending_alarm=Alarm(by=0, why="replicas differ"))
    job.ranks[2].is_alive = late_s == 0
    job.pass_time(late_s)
    job.ranks[2].is_alive = True
    job.pass_time(1)
    assert (2 in heard) == is_heard
    (judged_s,) = job.ranks[0].did(Judge)
    assert judged_s - began_s < min(late_s, COLLECT_REPLICAS_TIMEOUT_S) + 0.5


def test_if_the_lowest_ranks_are_dead_the_next_one_judges():
    job = Job(4)
    job.verdict = CERTAIN
    job.ranks[0].is_alive = job.ranks[1].is_alive = False
    job.unresponsive = {0, 1}
    began_s = job.stall(2, 3)
    job.pass_time(6)
    assert job.judges() == {"judge.1": b"2"}
    assert job.ranks[2].did(Judge)[0] - began_s - 3 >= 2 * ELECTION_INTERVAL_S
    assert len(job.ranks[3].did(ReportFault)) == 1


def test_a_judge_that_dies_ends_the_investigation_after_a_while():
    job = Job(2)
    began_s = job.stall(0, 1)
    job.pass_time(3)

    def die(me: Participant) -> Verdict:
        job.ranks[0].is_connected = job.ranks[0].is_alive = False
        return CERTAIN

    job.verdict = die
    job.pass_time(1)
    assert job.ranks[1].me.state is State.INVESTIGATING
    job.verdict = CERTAIN
    job.unresponsive = {0}
    job.pass_time(INVESTIGATION_TIMEOUT_S - 0.5)
    assert (job.ranks[1].me.state, job.ranks[1].me.alarms) == (State.INVESTIGATING, 2), "it raises the alarm again"
    job.pass_time(1.5)
    assert job.judges()["judge.2"] == b"1"
    assert job.ranks[1].did(ReportFault)[0] > began_s + 3 + INVESTIGATION_TIMEOUT_S


@pytest.mark.parametrize("verdict", [LIKELY, replace(LIKELY, kind="failed")], ids=lambda verdict: verdict.kind)
def test_a_suspicion_is_withdrawn_when_the_job_goes_on(verdict: Verdict):
    job = Job(2)
    job.verdict = verdict
    job.stall(0)
    job.pass_time(5)
    assert [len(rank.did(RetractReport)) for rank in job.ranks] == [0, 0]
    for rank in job.ranks:
        rank.train(STEPS + 1)
    job.pass_time(0.5)
    retractions = [next(a for _, a in rank.done if isinstance(a, RetractReport)) for rank in job.ranks]
    assert [retraction.was_judge for retraction in retractions] == [True, False]
    job.stall(0)
    job.pass_time(15)
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [2, 2], "the same fault again is reported again"


def test_a_suspicion_is_withdrawn_in_a_last_step_which_no_other_follows():
    job = Job(2)
    job.verdict = LIKELY
    job.stall(0)
    job.pass_time(5)
    for rank in job.ranks:
        rank.has_got_past = True
    job.pass_time(0.5)
    assert [len(rank.did(RetractReport)) for rank in job.ranks] == [1, 1]


def test_a_suspicion_is_reported_again_once_it_is_certain_and_not_if_it_is_in_doubt_again():
    job = Job(2)
    for verdict in (LIKELY, replace(LIKELY, alternative="", blamed=(1,), suspected=()), LIKELY):
        job.verdict = verdict
        for rank in job.ranks:
            rank.me = replace(rank.me, no_alarm_until_idle_s=0.0)
        job.stall(0)
        job.pass_time(5)
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [2, 2]


def test_a_fault_that_does_not_pass_is_not_withdrawn():
    job = Job(2)
    job.verdict = Verdict(kind="swapped collectives", sentence="", blamed=(1,))
    for rank in (0, 1):
        job.ranks[rank].me = add_divergences(job.ranks[rank].me, [DIVERGENCE] if rank else [])
    job.pass_time(1)
    for rank in job.ranks:
        rank.train(STEPS + 1)
    job.pass_time(1)
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 1]
    assert [len(rank.did(RetractReport)) for rank in job.ranks] == [0, 0]


DIVERGENCE = DivergenceLocation(group="0", difference=EntryDifference(number=7, divergence="signature"))


def test_a_divergence_that_one_rank_finds_is_known_to_all():
    job = Job(3)
    job.verdict = Verdict(kind="swapped collectives", sentence="", blamed=(1,))
    job.ranks[1].me = add_divergences(job.ranks[1].me, [DIVERGENCE, DIVERGENCE])
    job.pass_time(1)
    assert [rank.me.divergences for rank in job.ranks] == [(DIVERGENCE,)] * 3
    assert job.number_of_alarms() == 1


def test_a_slow_job_is_looked_at_less_and_less_often_and_logged_once():
    job = Job(2, stall_timeout_s=1000)
    job.verdict = SLOW
    job.stall(0)
    job.pass_time(100)
    assert 3 <= job.number_of_alarms() <= 8, "at twice the stall each time, and when it counts as stuck"
    assert [len(rank.did(LogSlow)) for rank in job.ranks] == [1, 0], "by the judge"
    assert not any(rank.did(ReportFault) or rank.did(Abort) for rank in job.ranks)


def test_a_stall_whose_time_is_not_up_is_looked_at_again_when_it_is():
    job = Job(2)
    job.verdict, job.undecided_time_ns = SLOW, 2 * 10**9
    began_s = job.stall(0)
    job.pass_time(4)
    job.verdict = LIKELY
    job.pass_time(2.5)
    assert 5 <= job.ranks[0].did(ReportFault)[0] - began_s < 6.1, "and not after twice the stall"


def test_a_job_that_may_be_slow_is_stopped_after_the_stall_timeout_only():
    job = Job(2, stall_timeout_s=30)
    job.verdict = LIKELY
    began_s = job.stall(0)
    job.pass_time(29.5)
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 1]
    assert len(job.ranks[0].did(LogMayContinue)) == 1
    assert not any(rank.did(Abort) for rank in job.ranks)
    job.pass_time(2)
    assert all(30 <= rank.did(Abort)[0] - began_s < 31.5 for rank in job.ranks)


def test_a_job_that_is_slow_is_not_stopped_after_the_stall_timeout_either():
    job = Job(2, stall_timeout_s=10)
    job.verdict = SLOW
    job.stall(0)
    job.pass_time(40)
    assert not any(rank.did(ReportFault) or rank.did(Abort) for rank in job.ranks)
    assert job.number_of_alarms() < 12, "nor is it looked at all the time"


def test_a_job_that_can_not_continue_is_stopped_at_once_on_all_ranks():
    job = Job(3, stall_timeout_s=1000)
    job.verdict = CERTAIN
    began_s = job.stall(0, 2)
    job.pass_time(4)
    assert all(3 <= rank.did(Abort)[0] - began_s < 3.8 for rank in job.ranks)
    assert all(rank.did(ReportFault)[0] <= rank.did(Abort)[0] for rank in job.ranks)
    assert all(rank.me.is_failure_known for rank in job.ranks)
    assert job.states() == {State.IDLE}


def test_a_rank_that_has_not_answered_is_not_waited_for_when_the_job_stops():
    job = Job(3, stall_timeout_s=1000)
    job.verdict = CERTAIN
    job.ranks[1].is_alive, job.unresponsive = False, {1}
    job.stall(0, 2)
    job.pass_time(5)
    assert job.ranks[0].did(Abort)[0] - job.ranks[0].did(Judge)[0] < 0.5 < ACKNOWLEDGE_TIMEOUT_S


def test_a_report_is_not_withdrawn_while_the_job_stops():
    job = Job(3, stall_timeout_s=1000)
    job.verdict = Verdict(kind="stopped", sentence="Rank 1 is stopped.", blamed=(1,))
    job.stall(0, 1, 2)
    while job.ranks[0].me.state is not State.STOPPING:
        job.pass_time(0.02, every_s=0.02)
    job.ranks[2].is_alive = False  # the judge waits for it
    job.ranks[0].train(STEPS + 1)
    job.pass_time(0.2)
    assert job.ranks[0].me.state is State.STOPPING
    assert job.ranks[0].did(RetractReport) == []


def test_a_fault_that_is_found_again_is_reported_once():
    job = Job(2, stall_timeout_s=1000)
    job.verdict = LIKELY
    job.stall(0)
    job.pass_time(5)
    job.ranks[1].has_unreduced_gradients = True
    job.pass_time(2)
    assert job.number_of_alarms() == 2
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 1]
    assert len(job.ranks[0].did(LogMayContinue)) == 1


def test_at_startup_a_stall_is_noticed_early_and_looked_at_every_few_seconds():
    job = Job(2, steps=0)
    job.pass_time(0.1)
    job.stall(0)
    job.pass_time(4.5)
    assert job.number_of_alarms() == 0
    job.pass_time(19)
    assert job.number_of_alarms() == 4


def test_a_judge_reads_what_is_left_of_a_rank_that_does_not_answer():
    job = Job(3)
    job.verdict = LIKELY
    job.stall(0)
    job.pass_time(5)
    job.ranks[2].is_alive = False
    last = Heartbeat(evidence=RankEvidence(rank=2), host_id="a", start_ticks=1, time_ns=1)
    job.store.set("heartbeat.2", to_json(last))
    job.ranks[1].is_failing = True
    job.pass_time(0.4)
    case = job.ranks[0].me.investigation
    assert case is not None
    assert (case.number, set(case.snapshots), set(case.previous_snapshots)) == (2, {0, 1}, {2})
    assert case.heartbeats == {2: last}


def test_no_rank_stops_before_the_others_know_why():
    job = Job(3, stall_timeout_s=1000)
    job.verdict = CERTAIN
    job.stall(0, 1, 2)
    job.pass_time(3.4)
    job.ranks[2].is_alive = False  # it is busy for a moment, and has published its snapshot
    job.pass_time(0.6)
    assert {rank.me.state for rank in job.ranks[:2]} == {State.STOPPING}
    assert not any(rank.did(Abort) for rank in job.ranks)
    job.ranks[2].is_alive = True
    job.pass_time(0.5)
    assert all(len(rank.did(Abort)) == 1 for rank in job.ranks)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_while_the_job_stops_is_waited_for_briefly(dead):
    job = Job(3, stall_timeout_s=1000)
    job.verdict = CERTAIN
    job.stall(0, 1, 2)
    while job.ranks[1].me.state is not State.STOPPING:
        job.pass_time(0.02, every_s=0.02)
    # The acknowledgement of a rank that dies is lost, as is the judge's word to stop.
    job.ranks[dead].is_alive = False
    began_s = job.now_s
    lost = [key for key in job.store.content if key in ("stop.1", f"stop.1.{dead}")]
    for key in lost:
        del job.store.content[key]
    job.pass_time(2)
    limit_s = ACKNOWLEDGE_TIMEOUT_S * (1.5 if dead == 0 else 1)
    assert limit_s - 0.2 < job.ranks[1].did(Abort)[0] - began_s < limit_s + 0.3


def test_a_failing_rank_waits_until_the_others_know_and_is_not_stopped():
    job = Job(2, stall_timeout_s=1000)
    job.verdict = Verdict(kind="exception", sentence="Rank 1 has failed.", blamed=(1,))
    job.ranks[1].is_failing = True
    job.pass_time(0.1)
    assert not job.ranks[1].me.is_failure_known
    job.pass_time(0.5)
    assert job.ranks[1].me.is_failure_known
    job.pass_time(3)
    assert [len(rank.did(Abort)) for rank in job.ranks] == [1, 0]
    assert job.number_of_alarms() == 1, "its failure is known"


def test_a_rank_that_fails_in_an_investigation_publishes_its_snapshot_again():
    job = Job(2)
    job.stall(0)
    while job.ranks[1].me.state is not State.INVESTIGATING:
        job.pass_time(0.02, every_s=0.02)
    job.ranks[0].is_alive = False  # the judge is late
    assert snapshot_key_due(job.ranks[1].me, is_failing=False) == "snapshot.1.1"
    job.pass_time(0.1)
    assert snapshot_key_due(job.ranks[1].me, is_failing=False) is None
    assert snapshot_key_due(job.ranks[1].me, is_failing=True) == "snapshot.1.1", "it has failed since"
    assert snapshot_key_due(on_no_reply(job.ranks[1].me), is_failing=False) == "snapshot.1.1", "it may be lost"


def test_a_store_that_does_not_answer_is_logged_once_with_the_position():
    job = Job(2, stall_timeout_s=10)
    for rank in job.ranks:
        rank.is_connected = False
    job.pass_time(2)
    assert not any(rank.done for rank in job.ranks), "nothing is wrong with the training"
    began_s = job.stall(0)
    job.pass_time(40)
    (logged_s,) = job.ranks[0].did(LogUnreachable)
    assert 3 <= logged_s - began_s < 3.5
    assert job.ranks[1].done == []
    job.ranks[1].is_failing = True
    job.pass_time(0.2)
    assert job.ranks[1].me.is_failure_known, "there is nobody to wait for"


def test_a_store_that_vanishes_while_the_job_stops_delays_nobody():
    job = Job(2, stall_timeout_s=1000)
    job.verdict = CERTAIN
    job.stall(0, 1)
    while job.ranks[1].me.state is not State.STOPPING:
        job.pass_time(0.02, every_s=0.02)
    job.ranks[1].is_connected = False
    job.pass_time(0.1)
    assert len(job.ranks[1].did(Abort)) == 1


def test_a_judge_asks_only_for_the_snapshots_that_are_missing():
    job = Job(3)
    job.ranks[2].is_alive = False
    job.stall(0)
    while not (job.ranks[0].me.investigation and job.ranks[0].me.investigation.snapshots.keys() == {0, 1}):
        job.pass_time(0.1)
    me = job.ranks[0].me
    assert missing_ranks(me) == [2]
    assert messages_of(me, job.now_s).keys_to_poll == ["snapshot.1.2", "snapshot.0.2", "heartbeat.2"]


@pytest.mark.parametrize(
    ("idle_s", "in_collective_s", "is_alarm"), [(10, None, False), (10, 2, False), (2, 10, False), (3, 3, True)]
)
def test_a_rank_has_stalled_if_it_is_idle_in_a_collective(idle_s, in_collective_s, is_alarm):
    job = Job(1)
    rank = job.ranks[0]
    now_s = (rank.tracker.advanced_at_s or 0.0) + idle_s
    seen = Observation(now_s=now_s, tracker=rank.tracker, progress=STEPS, in_collective_s=in_collective_s)
    assert (detect_alarm(rank.me, seen) is not None) == is_alarm


def test_gradients_that_were_not_reduced_are_an_alarm_once():
    job = Job(2)
    job.verdict = Verdict(kind="not reduced", sentence="", blamed=(0, 1))
    for rank in job.ranks:
        rank.has_unreduced_gradients = True
    job.pass_time(5)
    assert 1 <= job.number_of_alarms() <= 2
    assert [len(rank.did(ReportFault)) for rank in job.ranks] == [1, 1]
