"""When a rank has replicas investigated that differ from a neighbor's, on a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from instrumented_ddp.watchdog.peer_comparison import ReplicaCheck
from instrumented_ddp.watchdog.protocol import Heartbeat
from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.replica_drift import PassSummary

PERIOD = 4
DIFFERS_AT = 40


class OwnReplicas:
    """The replica of rank 0, from which that of rank 1 differs since some reduction."""

    def ranks_of(self, key: str) -> tuple[int, ...]:
        return (0, 1, 2)

    def agrees(self, key: str, rank: int, theirs: PassSummary) -> bool:
        return rank != 1 or theirs.first < DIFFERS_AT


def beat(rank: int, first: int) -> Heartbeat:
    summary = PassSummary(first=first, period=PERIOD, count=7, digest="")
    return Heartbeat(
        evidence=RankEvidence(rank=rank), host_id="a", start_ticks=1, time_ns=1, replicas={"model": summary}
    )


def find_alarm(monkeypatch: pytest.MonkeyPatch, *, late_until_s: float) -> float:
    """Return when an alarm is raised: ten reductions a second, and rank 2 publishes no later pass until some time."""
    check = ReplicaCheck(OwnReplicas())  # type: ignore[arg-type] # what it asks of the replicas
    for tenths in range(300):
        now_s, latest = tenths / 10, DIFFERS_AT + tenths // PERIOD * PERIOD
        clock = SimpleNamespace(monotonic=lambda now_s=now_s: now_s)
        monkeypatch.setattr("instrumented_ddp.watchdog.peer_comparison.time", clock)
        late = DIFFERS_AT - PERIOD if now_s < late_until_s else latest
        if check.found({1: beat(1, latest), 2: beat(2, late)}):
            return now_s
    raise AssertionError("no alarm")


def test_fingerprints_of_a_neighbor_that_are_late_are_waited_for_but_not_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt_s = find_alarm(monkeypatch, late_until_s=0)
    assert 1 <= prompt_s < 2
    assert find_alarm(monkeypatch, late_until_s=1) == prompt_s
    assert find_alarm(monkeypatch, late_until_s=4) == 4
    assert 5 < find_alarm(monkeypatch, late_until_s=30) < 15
