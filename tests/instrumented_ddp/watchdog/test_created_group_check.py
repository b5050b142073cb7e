"""Lists of ranks with which neighbors make process groups, compared by their heartbeats."""

from __future__ import annotations

from instrumented_ddp.watchdog.peer_comparison import CreatedGroupCheck, list_digest
from instrumented_ddp.watchdog.protocol import Heartbeat
from overlapscope.diagnosis.evidence import CreatedGroup, RankEvidence


def beat(**lists: tuple[int, ...]) -> Heartbeat:
    digests = {name: list_digest(ranks) for name, ranks in lists.items()}
    return Heartbeat(evidence=RankEvidence(rank=1), host_id="a", start_ticks=1, time_ns=1, created_groups=digests)


def test_another_list_is_found_once_and_only_under_the_same_name() -> None:
    check = CreatedGroupCheck()
    own = [CreatedGroup(name="1", ranks=(0, 1)), CreatedGroup(name="2", ranks=(0, 2))]
    assert not check.found(own, [beat(**{"1": (0, 1)}), beat(**{"3": (0,)})])
    assert check.found(own, [beat(**{"1": (0, 1), "2": (1, 2)})])
    assert not check.found(own, [beat(**{"2": (1, 2)})])
